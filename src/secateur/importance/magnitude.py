"""Weight magnitude: what is small matters little."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.importance.gather import Context, gather


@dataclass(frozen=True)
class Magnitude:
    """The p-norm of everything that goes when a position goes.

    >>> Magnitude(p=1).slices(torch.tensor([[1.0, -2.0], [0.0, 0.5]]), 0)
    tensor([3.0000, 0.5000], dtype=torch.float64)
    """

    p: float = 2.0

    def slices(self, weight: Tensor, dim: int) -> Tensor:
        """Σ |w|^p of each slice of a tensor along a dimension."""
        rows = weight.detach().movedim(dim, 0).flatten(1) if weight.ndim > 1 else weight.detach().unsqueeze(1)
        return rows.abs().to(torch.float64).pow(self.p).sum(1)

    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""
        return gather(context, self.slices).pow(1 / self.p)
