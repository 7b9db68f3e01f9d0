"""Backward elimination: one position after the other goes, and the rest takes over for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_STEPS = 128  # an axis with more positions loses several at a time


class Eliminated(Protocol):
    """What an error is made of: positions go, and the others may take over for them."""

    def errors(self, left: Tensor) -> Tensor:
        """What the error grows by when each of the positions that are left goes by itself."""

    def remove(self, positions: Tensor) -> None:
        """Let the others take over for some positions."""


class Alone:
    """Columns of which none takes over for another: `errors` of each, and the position of each, -1 for none."""

    def __init__(self, errors: Tensor, owner: Tensor) -> None:
        self._errors = torch.zeros(int(owner.max()) + 1, dtype=torch.float64)
        self._errors.index_add_(0, owner[owner >= 0], errors[owner >= 0])

    def errors(self, left: Tensor) -> Tensor:
        """What each position has by itself."""
        return F.pad(self._errors, (0, max(0, int(left.max()) + 1 - len(self._errors))))[left]

    def remove(self, positions: Tensor) -> None:
        """Nothing changes for the others."""


class Part:
    """A least-squares problem whose columns belong to positions.

    `inverse` is the inverse of the columns' second moments (columns, columns), `weight` what they are multiplied with
    (outputs, columns), `owner` the position of each column, -1 for none.

    When columns go, the inverse of what is left is the inverse before less a product `V Vᵀ`, a Cholesky step. Only
    its diagonal blocks, one for each position, are ever asked for, and the columns that go: these are kept up to date,
    and of the rest only the factor `V`.
    """

    def __init__(self, inverse: Tensor, weight: Tensor, owner: Tensor) -> None:
        self._inverse, self._weight = inverse, weight.to(inverse.dtype, copy=True)
        self._factor = inverse.new_empty(int((owner >= 0).sum()), len(inverse))
        self._filled = 0
        self._blocks = [_Block(inverse, *block) for block in _blocks(owner)]

    def errors(self, left: Tensor) -> Tensor:
        """What the error grows by when each of the positions that are left goes by itself."""
        total = torch.zeros(len(left), dtype=torch.float64)
        for block in self._blocks:
            at, mine = block.among(left)
            if len(at):
                weight = self._weight[:, block.columns[mine]].movedim(0, 2)  # positions, columns, outputs
                total[at] += _explained(block.inner[mine], weight @ weight.mT)
        return total

    def remove(self, positions: Tensor) -> None:
        """Let the others take over for some positions."""
        gone = [block.columns[block.among(positions)[1]].flatten() for block in self._blocks]
        columns = torch.cat(gone) if gone else torch.zeros(0, dtype=torch.long)
        if not len(columns):
            return
        before = self._factor[: self._filled]
        across = torch.addmm(self._inverse[columns], before[:, columns].mT, before, alpha=-1)
        root = _root(across[:, columns])
        step = torch.linalg.solve_triangular(root, across, upper=False)
        self._weight -= torch.linalg.solve_triangular(root, self._weight[:, columns].mT, upper=False).mT @ step
        self._weight[:, columns] = 0  # what is gone must not be reached again through rounding
        self._factor[self._filled : self._filled + len(columns)] = step
        self._filled += len(columns)
        for block in self._blocks:
            part = step[:, block.columns].movedim(0, 2)
            block.inner -= part @ part.mT


class _Block:
    """Positions with equally many columns, and the blocks that these have on the diagonal of an inverse."""

    def __init__(self, inverse: Tensor, positions: Tensor, columns: Tensor) -> None:
        self.positions, self.columns = positions, columns
        self.inner = inverse[columns.unsqueeze(2), columns.unsqueeze(1)]

    def among(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the chosen positions are here, and where here they are."""
        at = torch.isin(chosen, self.positions).nonzero().flatten()
        return at, torch.searchsorted(self.positions, chosen[at])


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


def eliminate(parts: Sequence[Eliminated], size: int) -> Tensor:
    """Remove position after position, those that cost least first; what each cost, never less than those before it.

    >>> inverse = torch.eye(3, dtype=torch.float64)
    >>> weight = torch.tensor([[2.0, 1.0, 3.0]], dtype=torch.float64)
    >>> eliminate([Part(inverse, weight, torch.tensor([0, 1, 2]))], 3)
    tensor([4., 1., 9.], dtype=torch.float64)
    """
    scores = torch.zeros(size, dtype=torch.float64)
    left = torch.arange(size)
    floor = torch.zeros((), dtype=torch.float64)
    while len(left) and parts:
        errors = torch.stack([part.errors(left) for part in parts]).sum(0)
        lowest = errors.argsort()[: max(1, min(size // _STEPS, len(left) // 4))]
        costs = torch.maximum(errors[lowest], floor)
        scores[left[lowest]] = costs
        floor = costs.amax()
        gone, left = left[lowest], left[torch.isin(left, left[lowest], invert=True)]
        if len(left):
            for part in parts:
                part.remove(gone)
    return scores
