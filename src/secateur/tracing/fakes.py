"""Fake tensors and modes that see ops, made as torch makes them, without what it does anew for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secateur.compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    as_subclass,
    compiler_now,
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


class OpMode(TorchDispatchMode):
    """Sees every op. Torch has its compiler look away each time; here only where that is at work."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raw: Any = vars(cls)["__torch_dispatch__"]
        super().__init_subclass__(**kwargs)
        unseen: Any = vars(cls)["__torch_dispatch__"]

        def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return (raw if compiler_now() is None else unseen)(self, func, types, args, kwargs)

        if compiler_now is not None and unseen is not raw:
            setattr(cls, "__torch_dispatch__", dispatch)  # noqa: B010


__all__ = ["OpMode", "fake_of"]
