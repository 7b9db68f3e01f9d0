"""What a method is given: a weight, the moments of its inputs, and what it should put out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secateur.sparse.patterns import Pattern


@dataclass(frozen=True, eq=False)
class Problem:
    """Find zeros for W, and new values for the rest, so that Σ ‖W x − y‖² over the data stays small.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> weight = torch.tensor([[3.0, 1.0]])
    >>> round(Problem.of(weight, x).error(torch.tensor([[[3.0, 0.0]]])), 6)  # in half of the rows, 1·2 is missing
    2.0

    All are laid out as (groups, outputs, summed); a linear layer has one group. `xx` is the mean of x xᵀ over the
    inputs that the layer will really have, `yx` that of y xᵀ; y is what the layer of the dense model puts out. Where
    `free` is False, a weight is zero already and stays so. `price` says what an error of each output costs, as
    (groups, outputs).
    """

    weight: Tensor
    xx: Tensor
    yx: Tensor
    free: Tensor
    price: Tensor
    rows: int = 0  # how many the moments are of; 0: unknown

    @staticmethod
    def of(weight: Tensor, x: Tensor, y: Tensor | None = None) -> Problem:
        """Of a matrix and rows of data; without `y`, what it makes of these."""
        w, rows = weight.unsqueeze(0), x.unsqueeze(0)
        out = rows @ w.mT if y is None else y.unsqueeze(0)
        n = max(1, len(x))
        return Problem(w, rows.mT @ rows / n, out.mT @ rows / n, w != 0, torch.ones_like(w[..., 0]), n)

    @property
    def own(self) -> Problem:
        """The same, but the weight's own outputs on these inputs are what it should put out."""
        return replace(self, yx=self.weight @ self.xx)

    @property
    def norms(self) -> Tensor:
        """The root mean square of each input, as (groups, summed)."""
        return self.xx.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().to(self.weight)

    def damped(self, share: float) -> Problem:
        """Held near the weight by a ridge, `share` of the mean square of an input: for what the data do not tell."""
        ridge = (share * self.xx.diagonal(dim1=-2, dim2=-1).mean(-1)).clamp_min(1e-30)[:, None, None]
        eye = torch.eye(self.xx.shape[-1], dtype=self.xx.dtype, device=self.xx.device)
        return replace(self, xx=self.xx + ridge * eye, yx=self.yx + ridge * self.weight)

    def error(self, weight: Tensor) -> float:
        """The mean squared error of a weight beyond that of the best one without zeros, each output at its price."""
        best = self.best()
        gap = weight.to(best) - best
        return float((((gap @ self.xx.to(best)) * gap).sum(-1) * self.price.to(best)).sum())

    def best(self) -> Tensor:
        """The weight without zeros that has the least error."""
        xx, yx = self.xx.double(), self.yx.double()
        factor, failed = torch.linalg.cholesky_ex(xx)
        if failed.any():  # inputs that say nothing: what is nearest to zero of all that are as good
            return yx @ torch.linalg.pinv(xx, hermitian=True)
        return torch.cholesky_solve(yx.mT, factor).mT

    def mask(self, scores: Tensor, pattern: Pattern) -> Tensor:
        """What stays by a pattern; what is zero already goes first."""
        return staying(scores, self.free, pattern)


def staying(scores: Tensor, free: Tensor, pattern: Pattern) -> Tensor:
    """What stays by a pattern of scores, as (groups, outputs, summed); what is not free goes first.

    >>> from secateur.sparse.patterns import Unstructured
    >>> staying(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[True, False]]]), Unstructured(0.5))
    tensor([[[ True, False]]])
    """
    rows = torch.where(free, scores.clamp_min(torch.finfo(scores.dtype).tiny), 0).flatten(0, 1)
    return pattern.mask(rows).view(scores.shape) & free


Method = Callable[[Problem, Pattern], Tensor]
