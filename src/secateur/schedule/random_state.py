"""The state of the global random generators (torch's on the CPU, NumPy's, Python's) as JSON data."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from secateur.errors import FileError

_NUMPY = "MT19937"  # the only generator that NumPy's global functions have, unless somebody puts in another
_WORDS = 624  # of its state


def random_state() -> dict[str, Any]:
    """The present state.

    >>> before = random_state()
    >>> drawn = torch.rand(1), np.random.rand(), random.random()
    >>> set_random_state(before)
    >>> drawn == (torch.rand(1), np.random.rand(), random.random())
    True
    """
    of_numpy: Any = np.random.get_state(legacy=False)
    if of_numpy["bit_generator"] != _NUMPY:
        raise FileError(f"NumPy's global generator is {of_numpy['bit_generator']}; a checkpoint can hold {_NUMPY} only")
    inner = {**of_numpy["state"], "key": of_numpy["state"]["key"].tolist()}
    return {
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "numpy": {**of_numpy, "state": inner},
        "python": random.getstate(),
    }


def set_random_state(state: Any) -> None:
    """Put a state back that `random_state` gave, also after a way through JSON; all generators or none."""
    before = random_state()
    try:
        _set(state)
    except Exception as error:  # each generator complains in its own way
        _set(before)
        raise FileError(f"its state of the random generators cannot be used: {error!r}") from None


def _set(state: Any) -> None:
    of_torch = base64.b64decode(state["torch"], validate=True)
    torch.set_rng_state(torch.tensor(list(of_torch), dtype=torch.uint8))
    of_numpy = state["numpy"]
    key, pos = np.array(of_numpy["state"]["key"], np.uint32), of_numpy["state"]["pos"]
    if of_numpy["bit_generator"] != _NUMPY or key.shape != (_WORDS,) or pos not in range(_WORDS + 1):
        raise ValueError(f"no state of NumPy's {_NUMPY}")  # it would take a wrong position and read beyond its end
    np.random.set_state({**of_numpy, "state": {"key": key, "pos": pos}})
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
