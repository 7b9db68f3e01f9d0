"""SparseGPT (Frantar and Alistarh, "Massive language models can be accurately pruned in one-shot", 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.arguments import a_number, an_int, check_fields
from secateur.errors import PlanError
from secateur.sparse.patterns import NM, Block, Pattern
from secateur.sparse.problem import Problem, staying


@dataclass(frozen=True)
class SparseGPT:
    """Column by column: what goes is made up for by the columns that follow, as the inputs' second moments tell.

    >>> from secateur.sparse.patterns import Unstructured
    >>> x = torch.tensor([[1.0, 1.0], [2.0, 2.0]])  # the second input repeats the first, so it can stand in for it
    >>> SparseGPT()(Problem.of(torch.tensor([[1.0, 2.0]]), x), Unstructured(0.5)).flatten()
    tensor([0.0000, 2.9...])

    As in the paper: `ridge` of 1% of the mean square of an input, masks chosen for `columns` columns at a time (N:M:
    M at a time) by w²/[H⁻¹]², fitted to the weight's own outputs on the inputs that it will have.
    """

    ridge: float = 0.01
    columns: int = 128

    def __post_init__(self) -> None:
        check_fields(self, PlanError, ridge=a_number(least=0), columns=an_int(1))

    def __call__(self, problem: Problem, pattern: Pattern) -> Tensor:
        weight, upper, free = self._prepared(problem)
        unit = pattern.m if isinstance(pattern, NM) else pattern.width if isinstance(pattern, Block) else 1
        at_a_time = max(unit, self.columns // unit * unit)
        chosen_for = pattern.m if isinstance(pattern, NM) else at_a_time
        for start in range(0, weight.shape[-1], at_a_time):
            end = min(start + at_a_time, weight.shape[-1])
            part, own = weight[..., start:end], upper[..., start:end, start:end]
            errors = torch.zeros_like(part)
            for i in range(end - start):
                if i % chosen_for == 0:
                    these = slice(i, min(i + chosen_for, end - start))
                    diagonal = own.diagonal(dim1=-2, dim2=-1)[:, None, these]
                    scores = (part[..., these] / diagonal).square()
                    mask = staying(scores, free[..., start:end][..., these], pattern)
                error = torch.where(mask[..., i % chosen_for], 0, part[..., i]) / own[:, i, i, None]
                part[..., i:] -= error.unsqueeze(-1) * own[:, i, None, i:]
                part[..., i] = torch.where(mask[..., i % chosen_for], part[..., i], 0)
                errors[..., i] = error
            weight[..., end:] -= errors @ upper[..., start:end, end:]
        return torch.where(free, weight, 0).to(problem.weight.dtype)

    def _prepared(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        """A copy of the weight, the upper Cholesky factor of the inverse moments, and which weights are free."""
        xx = problem.damped(self.ridge).xx
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(xx))
        upper = torch.linalg.cholesky(inverse, upper=True)
        dead = problem.xx.diagonal(dim1=-2, dim2=-1) == 0  # an input that is always zero
        free = problem.free & ~dead.unsqueeze(1)
        return torch.where(free, problem.weight, 0).to(xx.dtype), upper, free
