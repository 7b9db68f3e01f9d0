"""Chance: the baseline that every criterion must beat."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.importance.criterion import Criterion
from secateur.importance.gather import Context


@dataclass(frozen=True)
class Random(Criterion):
    """Uniform scores, the same for the same seed and axis on every machine.

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> one, two = (sec.plan(graph, sec.Ratio(0.5), importance=sec.Random(7)) for _ in range(2))
    >>> one == two
    True
    """

    seed: int = 0

    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""
        seed = zlib.crc32(f"{self.seed} {context.axis.name}".encode())
        return torch.rand(context.axis.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
