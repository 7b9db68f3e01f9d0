"""What a module of helpers remembers for the models of others: see `sharing_models.Remembers`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

TABLES: dict[tuple[int, int], Tensor] = {}


def table(t: int, d: int) -> Tensor:
    if (t, d) not in TABLES:
        TABLES[t, d] = torch.sin(torch.arange(t)[:, None] * 0.3 + torch.arange(d))
    return TABLES[t, d]


@functools.cache
def causal(t: int) -> Tensor:
    return torch.tril(torch.ones(t, t))


class Rates:
    """A class whose attribute is a cache."""

    made: dict[int, Tensor] = {}  # noqa: RUF012

    @classmethod
    def of(cls, t: int) -> Tensor:
        if t not in cls.made:
            cls.made[t] = torch.linspace(0.5, 1.5, t)[:, None]
        return cls.made[t]


def forget() -> None:
    TABLES.clear()
    causal.cache_clear()
    Rates.made.clear()
