"""Models that go other ways with other settings: arguments left out or otherwise, attributes that code asks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from beyond.harness import Case, Do, floats

# arguments ------------------------------------------------------------------------------------------------------


class Latents(nn.Module):
    """Learned latents read the input; what they have read comes out where nobody asks them anything."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.latents, self.scores = nn.Parameter(torch.randn(3, d)), nn.Linear(4, d)
        self.up, self.down, self.out = nn.Linear(d, 12), nn.Linear(12, d), nn.Linear(d, 2)

    def forward(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        read = torch.sigmoid(self.latents @ self.scores(x).mT).mean(-1, keepdim=True) * self.latents
        read = read + self.down(torch.relu(self.up(read)))
        return read if queries is None else self.out(queries @ read)


class Flow(nn.Module):
    """A coupling layer; only in reverse a hidden layer is taken apart."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(2, d), nn.Linear(d, 2)])

    def forward(self, x: Tensor, reverse: bool = False) -> Tensor:
        a, b = x.chunk(2, -1)
        h = torch.relu(self.net[0](a))
        if reverse:
            h = torch.cat([h[:, :6] * 2, h[:, 6:]], -1)
        shift = self.net[1](h)
        return torch.cat([a, b - shift if reverse else b + shift], -1)


class Chosen(nn.Module):
    """An argument in words chooses how a layer is read."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, d), nn.Linear(d, 3)

    def forward(self, x: Tensor, how: str = "plain") -> Tensor:
        h = torch.relu(self.a(x))
        if how == "swapped":
            h = torch.cat(h.chunk(2, -1)[::-1], -1)
        return self.b(h)


# attributes -----------------------------------------------------------------------------------------------------


class Flag(nn.Module):
    """A plain attribute decides whether the first of its features count twice."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.a, self.b, self.doubled = nn.Linear(4, d), nn.Linear(d, 3), False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if self.doubled:
            h = torch.cat([h[:, :8] * 2, h[:, 8:]], 1)
        return self.b(h)


class Mode(Flag):
    """It is one of several words, and the width is an attribute, too."""

    def __init__(self, d: int = 16) -> None:
        super().__init__(d)
        self.d, self.mode = d, "all"

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if self.mode == "half":
            return self.b(nn.functional.pad(h[:, : self.d // 2], (0, self.d // 2)))
        return self.b(h)


def once(name: str, value: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    """Call a model with another value of an attribute."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        before = getattr(model, name)
        setattr(model, name, value)
        try:
            return model(x)
        finally:
            setattr(model, name, before)

    return run


class Branches(nn.Module):
    """RepVGG: three ways side by side, which a method of its own makes one of."""

    def __init__(self, c: int = 8, groups: int = 1) -> None:
        super().__init__()
        self.c, self.groups = c, groups
        self.stem, self.head = nn.Conv2d(3, c, 3), nn.Conv2d(c, 2, 1)
        self.dense, self.point = nn.Conv2d(c, c, 3, padding=1, groups=groups), nn.Conv2d(c, c, 1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        return self.head(torch.relu(self.dense(h) + self.point(h) + h if hasattr(self, "point") else self.dense(h)))

    def fused(self) -> Branches:
        made = copy.deepcopy(self)
        across = self.c // self.groups
        same = torch.zeros(self.c, across, 3, 3)
        for i in range(self.c):
            same[i, i % across, 1, 1] = 1
        made.dense.weight.data += nn.functional.pad(self.point.weight.data, [1] * 4) + same
        made.dense.bias.data += self.point.bias.data
        del made.point
        return made


class Parts(nn.Module):
    """Where the parts of a layer begin is summed up by NumPy."""

    def __init__(self, m: int = 6, d: int = 8) -> None:
        super().__init__()
        self.parts = [m, 1, 3]
        self.up, self.split, self.down = nn.Linear(4, d), nn.Linear(d, sum(self.parts)), nn.Linear(m, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, at = self.split(torch.relu(self.up(x))), np.cumsum([0, *self.parts])
        key, gate, rest = (h[:, at[i] : at[i + 1]] for i in range(3))
        return self.down(key * gate) + rest.mean(-1, keepdim=True)


class GroupsOfFour(nn.Module):
    """As many groups as there are fours of channels."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, d, 3), nn.Conv2d(d, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.relu(nn.functional.group_norm(h, h.shape[1] // 4)))


def rows() -> list[Any]:
    return [floats(n, 4, seed=n) for n in (3, 5)]


def images() -> list[Any]:
    return [floats(2, 3, 6, 6), floats(1, 3, 7, 5)]


CASES = (
    Case("nobody asks", Latents, lambda: [(floats(2, 5, 4), floats(2, 4, 3)), floats(1, 6, 4)]),
    Case("in reverse", Flow, lambda: [floats(3, 4), {"x": floats(2, 4), "reverse": True}]),
    Case("chosen in words", Chosen, lambda: [floats(3, 4), (floats(2, 4), "swapped")]),
    Case("a flag", Flag, lambda: [*rows(), Do(once("doubled", True), floats(2, 4))]),
    Case("a mode", Mode, lambda: [*rows(), Do(once("mode", "half"), floats(2, 4))]),
    Case("branches that are fused", Branches, lambda: [*images(), Do(lambda m, x: m.fused()(x), floats(1, 3, 6, 6))]),
    Case(
        "grouped branches that are fused",
        lambda: Branches(groups=2),
        lambda: [*images(), Do(lambda m, x: m.fused()(x), floats(1, 3, 6, 6))],
        may_refuse="c is its size, and code that no run reached computes with it (settings_models.py",
    ),
    Case("parts summed up by NumPy", Parts, rows),
    Case("groups of four", GroupsOfFour, images),
)
