"""A file with what to go on from: plain values, with tensors in them, as safetensors and JSON; no pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from secateur.errors import FileError
from secateur.io.atomic import replacing
from secateur.io.file import about
from secateur.planning.json import parse

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError)


def keep(path: str | os.PathLike[str], kind: str, value: Mapping[str, Any]) -> None:
    """Write a value as a file of some kind, in the place of one that is there.

    >>> import tempfile, torch
    >>> path = f"{tempfile.mkdtemp()}/kept"
    >>> keep(path, "a_test", {"steps": 3, "at": [float("inf"), {2: torch.ones(2)}]})
    >>> kept(path, "a_test")
    {'steps': 3, 'at': [inf, {2: tensor([1., 1.])}]}
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_flat(value, tensors))
    with about(path) as place, replacing(place, overwrite=True) as new:
        save_file(tensors, new, {kind: text})


def kept(path: str | os.PathLike[str], kind: str, anew: str = "") -> dict[str, Any]:
    """What `keep` wrote; a file of another kind is refused, with what to do about it."""
    with about(path) as place:
        try:
            with safe_open(place, framework="pt") as file:
                data = parse(((file.metadata() or {}).get(kind) or "null").encode())
                found = _unflat(data, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (SafetensorError, OSError, RecursionError, *MALFORMED) as error:
            raise FileError(f"it is damaged, or something else: {error}{anew}") from None
        if not isinstance(found, dict):
            raise FileError(f"it is damaged, or something else{anew}")
        return found


def _flat(value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON, with tensors named by their place in a list beside it, and floats as text, which may be infinite."""
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"items": [[key, _flat(one, tensors)] for key, one in value.items()]}
    if isinstance(value, tuple | list):
        return [_flat(one, tensors) for one in value]
    return {"float": str(value)} if isinstance(value, float) else value


def _unflat(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        if "float" in value:
            return float(value["float"])
        return {key: _unflat(one, tensors) for key, one in value["items"]}
    if isinstance(value, list):
        return [_unflat(one, tensors) for one in value]
    return value
