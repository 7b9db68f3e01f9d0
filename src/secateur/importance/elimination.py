"""Backward elimination: one position after the other goes, and the rest takes over for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_STEPS = 128  # an axis with more positions loses several at a time


class Part:
    """A least-squares problem whose columns belong to positions.

    `inverse` is the inverse of the columns' second moments (groups, columns, columns), `weight` what they are
    multiplied with (groups, outputs, columns), `owner` the position of each (groups, columns), -1 for none.
    """

    def __init__(self, inverse: Tensor, weight: Tensor, owner: Tensor) -> None:
        self._inverse, self._weight = inverse.clone(), weight.clone()
        self._groups = [_blocks(own) for own in owner]

    def errors(self, left: Tensor) -> Tensor:
        """What the error grows by when each of the positions that are left goes by itself."""
        total = torch.zeros(len(left), dtype=torch.float64)
        for g, blocks in enumerate(self._groups):
            for position, columns in blocks:
                at = torch.isin(left, position).nonzero().flatten()
                if not len(at):
                    continue
                cols = columns[torch.searchsorted(position, left[at])]
                inner = self._inverse[g][cols.unsqueeze(2), cols.unsqueeze(1)]
                weight = self._weight[g][:, cols].permute(1, 2, 0)  # positions, columns, outputs
                total[at] += (torch.linalg.solve(inner, weight) * weight).sum((1, 2))
        return total

    def remove(self, positions: Tensor) -> None:
        """Let the others take over for some positions."""
        for g, blocks in enumerate(self._groups):
            mine = [columns[torch.isin(position, positions)].flatten() for position, columns in blocks]
            cols = torch.cat(mine) if mine else torch.zeros(0, dtype=torch.long)
            if not len(cols):
                continue
            over = torch.linalg.solve(self._inverse[g][cols][:, cols], self._inverse[g][cols])
            self._weight[g] -= self._weight[g][:, cols] @ over
            self._inverse[g] -= self._inverse[g][:, cols] @ over
            # What is gone must not be reached again through rounding.
            self._weight[g][:, cols] = 0
            self._inverse[g][cols] = 0
            self._inverse[g][:, cols] = 0


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


def eliminate(parts: Sequence[Part], size: int) -> Tensor:
    """Remove position after position, those that cost least first; what each cost, never less than those before it.

    >>> inverse = torch.eye(3, dtype=torch.float64).unsqueeze(0)
    >>> weight = torch.tensor([[[2.0, 1.0, 3.0]]], dtype=torch.float64)
    >>> eliminate([Part(inverse, weight, torch.tensor([[0, 1, 2]]))], 3)
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
