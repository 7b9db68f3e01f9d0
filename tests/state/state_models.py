"""Models that hold their state in unusual ways."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from state.reachable import FrozenDict


class Frozen(nn.Module):
    """A config that refuses to be changed, a forward that reads it."""

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.config = FrozenDict(width=8, sizes=[8, 3], fail=fail)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu().reshape(-1, self.config["width"])
        if self.config["fail"]:
            raise RuntimeError("midway")
        return self.b(h)


class Slotted:
    """An object without `__dict__`."""

    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0


class Odd(nn.Module):
    """Attention, a norm, tensors in attributes, caches, a queue, slots, a hook, a module that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
        self.scale = torch.ones(8)
        self.config = SimpleNamespace(width=8, nested={"widths": (8, [8])})
        self.cache: dict[str, Any] = {"seen": []}
        self.last: deque[Any] = deque(maxlen=2)
        self.slots = Slotted()
        self.aside = [nn.Linear(8, 8)]
        self.names = {"b", "a"}
        self.gelu = self.activation
        self.a.register_forward_hook(lambda _m, _i, out: out * 1)
        self.a.weight.grad = torch.ones(8, 6)
        self.norm.weight.requires_grad_(False)

    def activation(self, x: Tensor) -> Tensor:
        self.cache["seen"].append(x.shape[0])
        return x.relu()

    def forward(self, x: Tensor) -> Tensor:
        h = self.gelu(self.norm(self.a(x))) * self.scale
        self.cache["h"], self.late = h, h + 1
        self.last.append(h)
        self.slots.count += h.shape[1]
        self.slots.last = h
        h = h.reshape(-1, self.config.nested["widths"][1][0])
        return self.out(self.aside[0](self.attention(h, h, h)[0]) + h) + self.out(self.a(self.b(h)))


def trained(model: nn.Module, x: Tensor) -> torch.optim.Optimizer:
    """An optimizer of the model, with state."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer
