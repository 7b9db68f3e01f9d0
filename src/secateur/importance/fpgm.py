"""Filter pruning by the geometric median: what is near to all others can be replaced by them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.importance.criterion import Criterion
from secateur.importance.gather import Context


@dataclass(frozen=True)
class FPGM(Criterion):
    """The sum of a position's distances to all others of its axis, over what makes it.

    >>> FPGM().distances(torch.tensor([[0.0], [1.0], [5.0]]))
    tensor([6., 5., 9.], dtype=torch.float64)
    """

    p: float = 2.0

    def distances(self, rows: Tensor) -> Tensor:
        """Σ_j ‖row_i − row_j‖_p for each row i, a few rows at a time."""
        rows = rows.detach().to(torch.float64)
        step = max(1, 2**24 // max(rows.numel(), 1))
        return torch.cat([torch.cdist(part, rows, p=self.p).sum(1) for part in rows.split(step)])

    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""
        axis = context.axis
        total = torch.zeros(axis.size, dtype=torch.float64)
        weights = [(site, weight) for site, weight in context.sites() if weight.ndim > 1]
        makers = [(site, weight) for site, weight in weights if site.dim == 0] or weights
        for site, weight in makers:
            slices = weight.detach().cpu().movedim(site.dim, 0).flatten(1)
            for owner in context.owners(site.tensor, site.dim):
                mine = owner.argsort(stable=True)[int((owner < 0).sum()) :]
                total += self.distances(slices[mine].reshape(axis.size, -1))
        return total
