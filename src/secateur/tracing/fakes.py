"""Fake tensors, made as torch makes them, without what it does anew for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secateur.compat import (
    FakeTensor,
    FakeTensorMode,
    as_subclass,
    data_guard,
)

_alike: dict[torch.device, dict[str, Any] | None] = {}  # by device, the attributes that all fake tensors have


def fake_of(mode: FakeTensorMode, meta: Tensor, device: torch.device) -> Any:
    """`FakeTensor(mode, meta, device)`, with the attributes of one that torch made.

    >>> made = fake_of(FakeTensorMode(), torch.empty(2, 3, device="meta"), torch.device("cpu"))
    >>> type(made).__name__, made.shape, made.device
    ('FakeTensor', torch.Size([2, 3]), device(type='cpu'))
    """
    if device not in _alike:
        made: Any = FakeTensor(mode, meta, device)
        _alike[device] = _attributes(made, device)
        return made
    attributes, guard = _alike[device], data_guard(mode)
    if attributes is None or guard is None:
        return FakeTensor(mode, meta, device)
    made = as_subclass(FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device)
    guard(made)
    made.__dict__.update(attributes, fake_mode=mode)
    return made


def _attributes(made: Any, device: torch.device) -> dict[str, Any] | None:
    """Those of a fake tensor but for its mode; None where they are not the same for all."""
    found = {name: value for name, value in vars(made).items() if name != "fake_mode"}
    plain = all(value is None or value is False or value == device for value in found.values())
    settled = device.type == "cpu" or device.index is not None  # else it is the present one of its kind
    return found if plain and settled and as_subclass is not None else None


__all__ = ["fake_of"]
