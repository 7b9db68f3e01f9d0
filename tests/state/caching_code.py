"""Caches in another Python module than the model's."""

import functools

import torch
from torch import Tensor

TABLES: dict[int, Tensor] = {}


@functools.cache
def remembered(n: int) -> Tensor:
    return torch.arange(n).float()


@functools.lru_cache(maxsize=4)
def sizes(n: int) -> tuple[int, ...]:
    return (n, n + 1)


def table(n: int) -> Tensor:
    if n not in TABLES:
        TABLES[n] = torch.arange(n).float()
    return TABLES[n]
