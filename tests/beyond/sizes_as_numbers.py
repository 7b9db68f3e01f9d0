"""Sizes that become numbers: divisors, roots, logarithms, text."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from beyond.harness import Case, floats


def over_float(h: Tensor) -> Tensor:
    return h * (4.0 / h.shape[-1])


def by_root(h: Tensor) -> Tensor:
    return h / math.sqrt(h.size(-1))


def by_numel(h: Tensor) -> Tensor:
    return h * (50.0 / h.shape.numel())


def by_len(h: Tensor) -> Tensor:
    return h * (3.0 / len(h[0]))


def by_log(h: Tensor) -> Tensor:
    return h * math.log(h.shape[1])


def by_numpy(h: Tensor) -> Tensor:
    return h * float(np.array([2.0, 4.0]).sum() / np.float64(h.shape[1]))


def by_small(h: Tensor) -> Tensor:
    n = h.shape[-1]
    return h + 1e-1 * n


def by_text(h: Tensor) -> Tensor:
    return h * int(f"{h.shape[-1]}") / 8


def by_float(h: Tensor) -> Tensor:
    return h * float(h.shape[-1]) ** -0.5


def by_tensor(h: Tensor) -> Tensor:
    return h / torch.tensor(h.shape[-1]).sqrt()


def by_prod(h: Tensor) -> Tensor:
    return h * (9 / math.prod(h.shape[1:]))


def by_power(h: Tensor) -> Tensor:
    return h * 2.0 ** -(h.shape[-1] / 16)


class Scaled(nn.Module):
    """Two layers with a number between them that the width of the first makes."""

    def __init__(self, scale: Callable[[Tensor], Tensor], d: int = 12) -> None:
        super().__init__()
        self.scale = scale
        self.a, self.b, self.c = nn.Linear(4, d), nn.Linear(d, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        h = self.scale(h)
        return self.c(torch.relu(self.b(h)))


class ScaledAttention(nn.Module):
    """Attention whose scale is a float made in the constructor, from the width of a head."""

    def __init__(self, d: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.scale = heads, float(d // heads) ** -0.5
        self.into, self.qkv, self.o, self.out = nn.Linear(3, d), nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = ((q * self.scale) @ k.mT).softmax(-1) @ v
        return self.out(x + self.o(y.transpose(1, 2).flatten(2)))


class Averaged(nn.Module):
    """A mean taken by hand: the sum over the size; over the batch and time too, which no cut changes."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv1d(3, d, 1), nn.Conv1d(d, 8, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        n, _, t = h.shape
        h = torch.relu(self.b(h * (8.0 / t)))
        return self.c(h.sum(-1) / t) * (1.0 / n) + 0.01 * t


SCALES = (
    over_float, by_root, by_numel, by_len, by_log, by_numpy, by_small, by_text, by_float, by_tensor, by_prod, by_power,
)  # fmt: skip


def scaled(how: Callable[[Tensor], Tensor]) -> Case:
    return Case(
        f"size {how.__name__.replace('_', ' ')}", lambda: Scaled(how), lambda: [floats(n, 4) for n in (3, 5, 1)]
    )


CASES = (
    *map(scaled, SCALES),
    Case("scale of attention, a float", ScaledAttention, lambda: [floats(2, 4, 3), floats(1, 6, 3)]),
    Case("means by hand", Averaged, lambda: [floats(2, 3, 4), floats(3, 3, 7)]),
)
