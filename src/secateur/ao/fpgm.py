"""Filter pruning via geometric median (https://arxiv.org/abs/1811.00250)."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from secateur.ao.errors import SparsifierNotImplementedError
from secateur.ao.rows import RowPruner

# Rows whose distances to all others are held at once: the memory needed is this many times the rows.
_CHUNK = 128


class FPGMPruner(RowPruner):
    """
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 1))
    >>> _ = model[0].weight.data.copy_(torch.tensor([3.0, 2.0, 0.1]).view(3, 1, 1, 1))
    >>> pruner = FPGMPruner(0.3)
    >>> pruner.prepare(model, None)
    >>> pruner.step()
    >>> model[0].parametrizations.weight[0].mask
    tensor([ True, False,  True])

    Masks the fraction `sparsity_level` (rounded) of each weight's rows, those with the smallest sum of
    distances to all rows, since the others can stand in for them. A level of 0 or less masks none, of 1 or
    more all. `dist` is 1, 2 (the default) for the L1 or L2 distance, or a function from a matrix of n rows to
    the n x n matrix of their distances.
    """

    _levels: ClassVar[tuple[float, float]] = (float("-inf"), float("inf"))

    def __init__(self, sparsity_level: float = 0.5, dist: Callable[[Tensor], Tensor] | int | None = None) -> None:
        dist = 2 if dist is None else dist
        if not callable(dist) and dist not in (1, 2):
            raise SparsifierNotImplementedError(f"FPGMPruner: no distance {dist!r}; give 1, 2 or a function")
        self.dist = dist
        super().__init__(defaults={"sparsity_level": sparsity_level})

    def _count(self, level: float, rows: int) -> int:
        return round(level * rows)

    def _saliency(self, weight: Tensor) -> Tensor:
        return self._compute_distance(weight)[None]

    def _compute_distance(self, t: Tensor) -> Tensor:
        """The sum of distances of each row of `t` to all rows."""
        rows = t.detach().flatten(1)
        if callable(self.dist):
            return self.dist(rows).abs().sum(1)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        return distance_sums(rows, self.dist)


def distance_sums(rows: Tensor, p: int) -> Tensor:
    """
    >>> distance_sums(torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]), p=2)
    tensor([ 5., 10.,  5.])

    For each row the sum of its Lp distances to all rows. Each pair is computed once, in chunks.
    """
    sums = rows.new_zeros(len(rows))
    norms = torch.linalg.vector_norm(rows, dim=1).square() if p == 2 and len(rows) > _CHUNK else None
    for start in range(0, len(rows), _CHUNK):
        stop = start + _CHUNK
        chunk = rows[start:stop]
        if norms is None:
            distances = torch.cdist(rows[:stop], chunk, p=p)
        else:
            squares = norms[:stop, None] + norms[start:stop]
            distances = squares.addmm_(rows[:stop], chunk.T, alpha=-2).clamp_min_(0).sqrt_()
            # A row's distance to itself is zero, where rounding would leave a little.
            distances[start:].fill_diagonal_(0)
        sums[start:stop] += distances.sum(0)
        sums[:start] += distances[:start].sum(1)
    return sums
