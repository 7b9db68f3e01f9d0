"""Backward elimination: remove positions one after the other, each time refitting the ones that remain.

A layer sums inputs with its weights, `y = W x`; remove some of the inputs and choose the weights of the others anew, so
that y changes least. With the inputs' second moments `H = E[x xᵀ]`, removing the columns q costs
`tr(W_q [H⁻¹]_qq⁻¹ W_qᵀ)`, and the best weights of the others are `W − W_q [H⁻¹]_qq⁻¹ [H⁻¹]_q:`. That is the step of the
Optimal Brain Surgeon (Hassibi, Stork and Wolff, 1993), here for sets of columns: a position owns one for each place of
a kernel, for each dimension of a head. Its score is what the error grows by when its turn comes, the cheapest first.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_STEPS = 128  # an axis with more positions loses several at a time


class ErrorTerm(Protocol):
    """One of the errors that are added up: positions are removed from it, and it may refit those that remain."""

    def errors(self, left: Tensor) -> Tensor:
        """What the error grows by when each of the positions that are left goes by itself."""

    def remove(self, positions: Tensor) -> None:
        """Take some positions away, and refit the others."""


class Independent:
    """Columns without a refit: `errors` of each, and the position of each, -1 for none."""

    def __init__(self, errors: Tensor, owner: Tensor) -> None:
        self._errors = torch.zeros(int(owner.max()) + 1, dtype=torch.float64)
        self._errors.index_add_(0, owner[owner >= 0], errors[owner >= 0])

    def errors(self, left: Tensor) -> Tensor:
        """What each position has by itself."""
        return F.pad(self._errors, (0, max(0, int(left.max()) + 1 - len(self._errors))))[left]

    def remove(self, positions: Tensor) -> None:
        """Nothing changes for the others."""


class Regression:
    """A least-squares problem whose columns belong to positions; it stays on the device of the inverse.

    `inverse` is the inverse of the columns' second moments (columns, columns), `weight` what they are multiplied with
    (outputs, columns), `owner` the position of each column, -1 for none.

    When columns go, the inverse of what is left is the inverse before less a product `Vᵀ V`, a Cholesky step. Only
    its diagonal blocks, one for each position, are ever asked for, and the columns that go: these are kept up to date,
    and of the rest only the factor `V`. What no position owns is never asked for. Columns are held in the order of the
    blocks; when half of them are gone, the problem begins anew with the others. Which columns are whose is known on the
    CPU, so that the host waits for the errors and for nothing else.
    """

    def __init__(self, inverse: Tensor, weight: Tensor, owner: Tensor) -> None:
        blocks = _blocks(owner)
        order = torch.cat([columns.flatten() for _, columns in blocks]) if blocks else owner.new_empty(0)
        self._begin(inverse, weight.to(inverse.dtype).mT, order)
        starts = torch.tensor([0, *(columns.numel() for _, columns in blocks)]).cumsum(0).tolist()
        self._blocks = [
            _Block(self._inverse, positions, slice(*span))
            for (positions, _), span in zip(blocks, pairwise(starts), strict=True)
        ]

    def _begin(self, inverse: Tensor, weight: Tensor, order: Tensor) -> None:
        """Hold some columns of an inverse and of (columns, outputs)."""
        every = len(order) == len(inverse) and bool((order.diff() == 1).all())
        order = order.to(inverse.device)
        self._inverse = inverse if every else inverse[order][:, order]
        self._weight = weight[order].contiguous()
        self._factor = self._inverse.new_empty(self._inverse.shape)
        self._filled = 0

    def errors(self, left: Tensor) -> Tensor:
        total = torch.zeros(len(left), dtype=torch.float64, device=self._inverse.device)
        for block in self._blocks:
            at, mine = (index.to(total.device) for index in block.among(left))
            if len(at):
                total[at] += _explained(block.inner[mine], _squares(block.of(self._weight))[mine])
        return total.cpu()

    def remove(self, positions: Tensor) -> None:
        columns = torch.cat([block.where(positions) for block in self._blocks]) if self._blocks else positions[:0]
        if not len(columns):
            return
        columns = columns.to(self._inverse.device)
        before = self._factor[: self._filled]
        across = torch.addmm(self._inverse[columns], before[:, columns].mT, before, alpha=-1)
        root = _root(across[:, columns])
        step = torch.linalg.solve_triangular(root, across, upper=False)
        self._weight -= step.mT @ torch.linalg.solve_triangular(root, self._weight[columns], upper=False)
        self._weight[columns] = 0  # what is gone must not be reached again through rounding
        self._factor[self._filled : self._filled + len(columns)] = step
        self._filled += len(columns)
        for block in self._blocks:
            part = block.of(step.mT)
            block.inner -= part @ part.mT
            block.gone[block.among(positions)[1]] = True
        if 2 * self._filled > len(self._inverse):
            self._halve()

    def _halve(self) -> None:
        """Begin anew with the columns that are left."""
        stay = torch.cat([~block.gone.repeat_interleave(block.each) for block in self._blocks]).nonzero().flatten()
        stay = stay.to(self._inverse.device)
        factor = self._factor[: self._filled, stay]
        inverse = torch.addmm(self._inverse[stay][:, stay], factor.mT, factor, alpha=-1)
        self._begin(inverse, self._weight[stay], torch.arange(len(stay)))
        start = 0
        for block in self._blocks:
            start = block.shrink(start)


class _Block:
    """Positions with equally many columns, one after the other, and their blocks on the diagonal of an inverse."""

    def __init__(self, inverse: Tensor, positions: Tensor, span: slice) -> None:
        self.positions, self.gone, self._span = positions, torch.zeros(len(positions), dtype=torch.bool), span
        self.each = (span.stop - span.start) // len(positions)
        columns = torch.arange(span.start, span.stop, device=inverse.device).view(-1, self.each)
        self.inner = inverse[columns.unsqueeze(2), columns.unsqueeze(1)]

    def of(self, rows: Tensor) -> Tensor:
        """The rows of its columns, as (positions, columns of each, ...)."""
        return rows[self._span].unflatten(0, (-1, self.each))

    def among(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the chosen positions are here, and where here they are."""
        at = torch.isin(chosen, self.positions).nonzero().flatten()
        return at, torch.searchsorted(self.positions, chosen[at])

    def where(self, chosen: Tensor) -> Tensor:
        """The columns of the chosen positions."""
        first = self._span.start + self.each * self.among(chosen)[1]
        return (first.unsqueeze(1) + torch.arange(self.each)).flatten()

    def shrink(self, start: int) -> int:
        """Forget what is gone; the columns begin at `start` now. Where they end."""
        left = (~self.gone).nonzero().flatten()
        self.positions, self.inner = self.positions[left], self.inner[left.to(self.inner.device)]
        self.gone = self.gone[~self.gone]
        self._span = slice(start, start + self.each * len(self.positions))
        return self._span.stop


def _blocks(owner: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The columns of each position: (positions, rising; their columns), positions with equally many together."""
    columns = owner.argsort(stable=True)[int((owner < 0).sum()) :]
    positions, sizes = owner[columns].unique_consecutive(return_counts=True)
    starts = sizes.cumsum(0) - sizes
    found = []
    for size in sizes.unique().tolist():
        alike = sizes == size
        found.append((positions[alike], columns[starts[alike].unsqueeze(1) + torch.arange(size)]))
    return found


def _squares(weight: Tensor) -> Tensor:
    """`weight weightᵀ`, matrix by matrix."""
    if weight.shape[1] == 1:
        return torch.linalg.vector_norm(weight, dim=2, keepdim=True).square()
    return weight @ weight.mT


def _explained(inner: Tensor, squares: Tensor) -> Tensor:
    """The trace of `inner⁻¹ squares`, matrix by matrix."""
    if inner.shape[-1] == 1:
        return (squares / inner.clamp_min(1e-300)).flatten()
    return torch.linalg.solve(_lifted(inner, 1e-12), squares).diagonal(dim1=-2, dim2=-1).sum(-1)


def _root(matrix: Tensor) -> Tensor:
    """The Cholesky factor, also where rounding took the matrix a little below positive."""
    lift = 1e-12
    while True:
        factor, failed = torch.linalg.cholesky_ex(_lifted(matrix, lift))
        if not failed:
            return factor
        lift *= 10


def _lifted(matrix: Tensor, share: float) -> Tensor:
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    lift = share * diagonal.abs().amax(-1, keepdim=True).clamp_min(1e-200)
    return matrix + torch.diag_embed(lift.expand_as(diagonal))


def eliminate(terms: Sequence[ErrorTerm], size: int) -> Tensor:
    """Remove position after position, those that cost least first; what each cost, never less than those before it.

    >>> inverse = torch.eye(3, dtype=torch.float64)
    >>> weight = torch.tensor([[2.0, 1.0, 3.0]], dtype=torch.float64)
    >>> eliminate([Regression(inverse, weight, torch.tensor([0, 1, 2]))], 3)
    tensor([4., 1., 9.], dtype=torch.float64)
    """
    scores = torch.zeros(size, dtype=torch.float64)
    left = torch.arange(size)
    floor = torch.zeros((), dtype=torch.float64)
    while len(left) and terms:  # of a large axis several at a time, as if none of them could express another
        errors = torch.stack([term.errors(left) for term in terms]).sum(0)
        lowest = errors.argsort()[: max(1, min(size // _STEPS, len(left) // 4))]
        costs = torch.maximum(errors[lowest], floor)
        scores[left[lowest]] = costs
        floor = costs.amax()
        gone, left = left[lowest], left[torch.isin(left, left[lowest], invert=True)]
        if len(left):
            for term in terms:
                term.remove(gone)
    return scores
