"""Weight magnitude: what is small matters little."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.importance.gather import Context, gather

_CHUNK = 2**18  # elements at a time: what fits into a core's cache


@dataclass(frozen=True)
class Magnitude:
    """The p-norm of everything that goes when a position goes.

    >>> Magnitude(p=1).slices(torch.tensor([[1.0, -2.0], [0.0, 0.5]]), 0)
    tensor([3.0000, 0.5000], dtype=torch.float64)
    """

    p: float = 2.0

    def slices(self, weight: Tensor, dim: int) -> Tensor:
        """Σ |w|^p of each slice of a tensor along a dimension."""
        before, after = math.prod(weight.shape[:dim]), math.prod(weight.shape[dim + 1 :])
        folded = weight.detach().reshape(before, weight.shape[dim], after)
        total = torch.zeros(weight.shape[dim], dtype=torch.float64, device=weight.device)
        cut, rows = (0, before) if before > 1 else (1, weight.shape[dim])
        step = max(1, _CHUNK * rows // max(weight.numel(), 1))
        for start in range(0, rows, step):
            part = folded.narrow(cut, start, min(step, rows - start))
            part = part.to(torch.promote_types(part.dtype, torch.float32))
            powers = (part * part if self.p == 2 else part.abs().pow_(self.p)).sum((0, 2))
            (total if cut == 0 else total[start : start + len(powers)]).add_(powers)
        return total

    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""
        return gather(context, self.slices).pow(1 / self.p)
