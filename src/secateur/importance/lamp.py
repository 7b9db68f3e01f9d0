"""Layer-adaptive magnitude: how much of an axis is lost with a position, when all that is smaller is gone already."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.importance.criterion import Criterion
from secateur.importance.gather import Context
from secateur.importance.magnitude import Magnitude


@dataclass(frozen=True)
class LAMP(Criterion):
    """Σ|w|^p of a position over that of all positions of its axis that are not smaller (Lee et al., 2021; p = 2).

    >>> LAMP().adapted(torch.tensor([1.0, 4.0, 3.0]))
    tensor([0.1250, 1.0000, 0.4286], dtype=torch.float64)

    The largest of every axis scores 1, so that a ranking across axes leaves something of each. Within an axis the
    order is that of `Magnitude(p)`.
    """

    p: float = 2.0

    def adapted(self, powers: Tensor) -> Tensor:
        """Each value over the sum of those that are not smaller; of equals, the first counts as the larger."""
        falling, order = powers.to(torch.float64).sort(descending=True, stable=True)
        shares = falling / falling.cumsum(0)
        shares[falling == 0] = 0.0
        shares[falling.isinf()] = 1.0
        return torch.empty_like(shares).index_copy_(0, order, shares)

    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""
        return self.adapted(Magnitude(self.p)(context).pow(self.p))
