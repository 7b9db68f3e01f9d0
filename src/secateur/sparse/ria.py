"""RIA (Zhang et al., "Plug-and-play: an efficient post-training pruning method for large language models", 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.arguments import a_number, check_fields
from secateur.errors import PlanError
from secateur.sparse.patterns import Pattern
from secateur.sparse.problem import Problem


@dataclass(frozen=True)
class RIA:
    """A weight's share of its row and of its column, times a power of ‖x‖; what stays is as it was.

    >>> from secateur.sparse.patterns import Unstructured
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
        scores = share * problem.norms.pow(self.power).unsqueeze(1)
        return torch.where(problem.mask(scores, pattern), problem.weight, 0)
