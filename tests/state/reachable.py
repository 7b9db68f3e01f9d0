"""Everything that can be reached from a model or an optimizer, object for object, as a value that can be compared."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import torch
from torch import Tensor, nn


class FrozenDict(OrderedDict):
    """A config that refuses to be changed, as those of diffusers' models do."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        for key, value in entries.items():
            setattr(self, key, value)
        self.__frozen = True

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a frozen dict cannot be changed")

    update = pop = setdefault = clear = popitem = __delitem__ = _refuse

    def __setitem__(self, key: Any, value: Any) -> None:
        if hasattr(self, "_FrozenDict__frozen"):
            self._refuse()
        super().__setitem__(key, value)

    def __setattr__(self, key: str, value: Any) -> None:
        if hasattr(self, "_FrozenDict__frozen"):
            self._refuse()
        super().__setattr__(key, value)


def reachable(*roots: Any) -> list[Any]:
    """One entry per object: which it is, its class, and what it holds, in order, by identity."""
    found: list[Any] = []
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        obj = stack.pop()
        if obj is None or id(obj) in seen or isinstance(obj, type):
            continue
        seen.add(id(obj))
        inside: list[Any] = []
        if isinstance(obj, Tensor):
            found.append(_tensor(obj))
            inside = [obj.grad] if obj.is_leaf and obj.grad is not None else []
        elif isinstance(obj, dict):
            pairs = list(dict.items(obj)) if not isinstance(obj, OrderedDict) else list(OrderedDict.items(obj))
            found.append((id(obj), type(obj), [(id(k), repr(k)[:40], id(v), _plain(v)) for k, v in pairs]))
            inside = [v for _, v in pairs]
        elif isinstance(obj, list | tuple | set | deque):
            inside = sorted(obj, key=id) if isinstance(obj, set) else list(obj)
            found.append((id(obj), type(obj), [(id(v), _plain(v)) for v in inside]))
        elif isinstance(obj, nn.Module | torch.optim.Optimizer):
            found.append((id(obj), type(obj), {k: id(v) for k, v in vars(type(obj)).items() if k != "__doc__"}))
        if hasattr(obj, "__dict__") and not isinstance(obj, Tensor):
            inside.append(obj.__dict__)
        stack += [each for each in inside if not callable(each) or isinstance(each, nn.Module)]
    return found


def _plain(value: Any) -> Any:
    return (type(value), value) if isinstance(value, int | float | str | bool) else None


def _tensor(tensor: Tensor) -> Any:
    bits = tensor.detach().clone().contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []
    kind = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.data_ptr())
    grad = id(tensor.grad) if tensor.is_leaf and tensor.grad is not None else None
    return (id(tensor), type(tensor), kind, bits, grad, {key: id(value) for key, value in vars(tensor).items()})
