"""An optimizer whose state follows a cut, so that training goes on."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from secateur.errors import ApplyError
from secateur.planning.plans import Kept


def following(optimizer: torch.optim.Optimizer, kept: Mapping[int, Kept]) -> Callable[[], None]:
    """What is left of an optimizer's state, by the ids of the parameters that are cut; a call puts it in place."""
    state = {p: _followed(optimizer, p, entry, kept[id(p)]) for p, entry in optimizer.state.items() if id(p) in kept}
    return lambda: optimizer.state.update(state)


def _followed(optimizer: torch.optim.Optimizer, param: Tensor, entry: Any, kept: Kept) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {key: _cut(optimizer, param, key, value, kept) for key, value in entry.items()}


def _cut(optimizer: torch.optim.Optimizer, param: Tensor, key: Any, value: Any, kept: Kept) -> Any:
    from secateur.surgery.cut import select

    if not isinstance(value, Tensor) or value.numel() <= 1:
        return value
    if value.shape == param.shape:
        return select(value, kept)
    raise ApplyError(
        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a parameter of shape "
        f"{tuple(param.shape)}, which cannot be cut along; make a new optimizer after the cut instead"
    )
