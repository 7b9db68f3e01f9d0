"""Methods that only choose: a score per weight, the lowest go, the others stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.arguments import a_number, check_fields
from secateur.errors import PlanError
from secateur.sparse.patterns import Pattern, Unstructured
from secateur.sparse.problem import Problem


def magnitude(problem: Problem, pattern: Pattern) -> Tensor:
    """|w|, over the whole weight.

    >>> magnitude(Problem.of(torch.tensor([[3.0, -1.0]]), torch.eye(2)), Unstructured(0.5))
    tensor([[[3., 0.]]])
    """
    return torch.where(problem.mask(problem.weight.abs(), pattern), problem.weight, 0)


def wanda(problem: Problem, pattern: Pattern) -> Tensor:
    """|w|·‖x‖, compared among the inputs of each output (Sun et al., "A simple and effective pruning approach", 2023).

    >>> wanda(Problem.of(torch.tensor([[3.0, -1.0]]), torch.tensor([[1.0, 9.0]])), Unstructured(0.5))
    tensor([[[ 0., -1.]]])
    """
    return _by_row(problem, problem.weight.abs() * _norms(problem).unsqueeze(1), pattern)


@dataclass(frozen=True)
class RIA:
    """A weight's share of its row and of its column, times a power of ‖x‖ (Zhang et al., "Plug-and-play", 2024).

    >>> RIA()(Problem.of(torch.tensor([[3.0, -1.0]]), torch.tensor([[1.0, 9.0]])), Unstructured(0.5))
    tensor([[[ 0., -1.]]])
    """

    power: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self, PlanError, power=a_number(least=0, most=100))

    def __call__(self, problem: Problem, pattern: Pattern) -> Tensor:
        size = problem.weight.abs()
        tiny = torch.finfo(size.dtype).tiny
        share = size / size.sum(2, keepdim=True).clamp_min(tiny) + size / size.sum(1, keepdim=True).clamp_min(tiny)
        scores = share * _norms(problem).pow(self.power).unsqueeze(1)
        return torch.where(problem.mask(scores, pattern), problem.weight, 0)


def _norms(problem: Problem) -> Tensor:
    """The root mean square of each input."""
    return problem.xx.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().to(problem.weight)


def _by_row(problem: Problem, scores: Tensor, pattern: Pattern) -> Tensor:
    """The lowest scores of each row go: their rank in the row takes the place of the score."""
    if isinstance(pattern, Unstructured):
        rows = torch.where(problem.free, scores, -1)
        ranks = rows.argsort(-1).argsort(-1)
        return torch.where((ranks >= round(pattern.sparsity * rows.shape[-1])) & problem.free, problem.weight, 0)
    return torch.where(problem.mask(scores, pattern), problem.weight, 0)
