"""More coding styles, each a function of the module and its input: weights, checks, positions, things done by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

TABLES: dict[Any, Tensor] = {}


class Style(nn.Module):
    """Two square layers, some things of the width at hand, and a function that runs them."""

    def __init__(self, d: int, name: str) -> None:
        super().__init__()
        self.name, self.d, self.shape, self.scale = name, d, (2, d // 2), d**-0.5
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)
        self.first: Any = None
        self.picked = [0, d - 1]
        if name == "weight norm":
            self.a = parametrizations.weight_norm(self.a)
        elif name == "spectral norm":
            self.a = parametrizations.spectral_norm(self.a)
        elif name == "tied":
            self.b.weight = self.a.weight
        elif name == "running statistics":
            self.norm = nn.BatchNorm1d(d)
        elif name == "index in a buffer":
            self.register_buffer("index", torch.tensor([d - 1, 0, 1]))
            self.b = nn.Linear(3, d)
        elif name in ("positions", "positions in a list", "last ones"):
            self.b = nn.Linear(2, d)
        elif name == "mask for the longest":
            self.register_buffer("mask", torch.ones(8, 8).tril(), persistent=False)

    @property
    def width(self) -> int:
        return self.a.out_features

    def forward(self, x: Tensor) -> Tensor:
        return RUNS[self.name](self, x)


def in_place(n: Style, x: Tensor) -> Tensor:
    h = n.a(x)
    h[:, 0] = 0.5
    h[..., 1:] += 0.25
    return n.b(h.mul_(2).relu_())


def first_shape(n: Style, x: Tensor) -> Tensor:
    if n.first is None:
        n.first = tuple(x.shape[2:])
    return torch.relu(n.a(x.reshape(*x.shape[:2], *n.first)))


def checks_width(n: Style, x: Tensor) -> Tensor:
    if x.shape[-1] != n.d:
        raise ValueError(f"{x.shape[-1]} features, not {n.d}")
    return torch.relu(n.a(x))


def asks_own_layers(n: Style, x: Tensor) -> Tensor:
    h = n.a(x).view(-1, n.width)
    assert h.size(1) == n.b.in_features
    return torch.relu(n.b(h)).view(*x.shape[:-1], n.b.weight.shape[0])


def heads_in_a_tuple(n: Style, x: Tensor) -> Tensor:
    h = n.a(x).view(*x.shape[:-1], *n.shape)
    return torch.relu(n.b((h * h.softmax(-2)).flatten(-2)))


def checkpointed(n: Style, x: Tensor) -> Tensor:
    run = lambda y: torch.relu(n.b(torch.relu(n.a(y))))  # noqa: E731
    return checkpoint(run, x, use_reentrant=False) if n.training else run(x)


def by_torch_func(n: Style, x: Tensor) -> Tensor:
    weights = {"weight": n.a.weight * 0.5, "bias": n.a.bias}
    return torch.relu(torch.func.functional_call(n.a, weights, (x,)))


def cached_outside(n: Style, x: Tensor) -> Tensor:
    t = x.shape[1]
    if t not in TABLES:
        TABLES[t] = torch.linspace(0.5, 1.0, t)[:, None]
    return torch.relu(n.a(x) * TABLES[t].to(x))


def running_statistics(n: Style, x: Tensor) -> Tensor:
    if x.shape[0] * x.shape[1] == 1 and n.training:
        return n.a(x)
    return torch.relu(n.norm(n.a(x).flatten(0, 1)).view(x.shape))


def window(n: Style, x: Tensor) -> Tensor:
    padded = F.pad(x, (0, 0, 2, 0))
    parts = [padded[:, i : i + x.shape[1]] for i in range(3)]
    return torch.relu(n.a(parts[0] + parts[2]) + n.b(parts[1]))


def causal_mean(n: Style, x: Tensor) -> Tensor:
    mask = n.mask[: x.shape[1], : x.shape[1]]
    return torch.relu(n.a((mask / mask.sum(-1, keepdim=True)) @ x))


def by_numpy(n: Style, x: Tensor) -> Tensor:
    rates = torch.from_numpy(np.linspace(0.5, 1.0, x.shape[1])).to(x)
    return torch.relu(n.a(x * rates[:, None]))


def split_unevenly(n: Style, x: Tensor) -> Tensor:
    a, b = n.a(x).split([2, x.shape[-1] - 2], dim=-1)
    return torch.relu(n.b(torch.cat([b, a], -1)))


def stores_features(n: Style, x: Tensor) -> Tensor:
    h = torch.relu(n.a(x))
    n.first = {"features": h.detach(), "shape": h.shape}
    return n.b(h)


RUNS: dict[str, Callable[[Style, Tensor], Tensor]] = {
    "weight norm": lambda n, x: torch.relu(n.b(torch.relu(n.a(x)))),
    "spectral norm": lambda n, x: torch.relu(n.b(torch.relu(n.a(x)))),
    "tied": lambda n, x: n.b(torch.relu(n.a(x))),
    "two ways": lambda n, x: F.linear(torch.relu(n.a(x)), n.a.weight.t()),
    "in place": in_place,
    "shape of the first call": first_shape,
    "checks its width": checks_width,
    "asks its own layers": asks_own_layers,
    "heads in a tuple": heads_in_a_tuple,
    "scale of the constructor": lambda n, x: n.b(n.a(x) * n.scale),
    "checkpointed": checkpointed,
    "functional call": by_torch_func,
    "cached outside": cached_outside,
    "running statistics": running_statistics,
    "window over time": window,
    "mask for the longest": causal_mean,
    "numpy over time": by_numpy,
    "split unevenly": split_unevenly,
    "stores features": stores_features,
    "positions": lambda n, x: n.b(torch.relu(n.a(x))[..., [0, 2]]),
    "positions in a list": lambda n, x: n.b(torch.relu(n.a(x))[..., n.picked]),
    "last ones": lambda n, x: n.b(torch.relu(n.a(x))[..., -2:]),
    "index in a buffer": lambda n, x: n.b(torch.relu(n.a(x))[..., n.index]),
    "softmax of features": lambda n, x: n.b(n.a(x).softmax(-1)),
    "sorted features": lambda n, x: n.b(n.a(x).sort(-1).values),
    "best features": lambda n, x: n.b(x) * n.a(x).topk(2, dim=-1).values.sum(-1, keepdim=True),
    "sums of features": lambda n, x: torch.relu(n.b(n.a(x).cumsum(-1))),
    "flipped features": lambda n, x: torch.relu(n.b(n.a(x).flip(-1))),
    "neighbours": lambda n, x: torch.relu(n.b(n.a(x) + n.a(x).roll(1, -1))),
}
