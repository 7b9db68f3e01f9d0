"""Wanda (Sun et al., "A simple and effective pruning approach for large language models", 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from secateur.sparse.patterns import Pattern, Unstructured
from secateur.sparse.problem import Problem


def wanda(problem: Problem, pattern: Pattern) -> Tensor:
    """|w|·‖x‖, compared among the inputs of each output; what stays is as it was.

    >>> wanda(Problem.of(torch.tensor([[3.0, -1.0]]), torch.tensor([[1.0, 9.0]])), Unstructured(0.5))
    tensor([[[ 0., -1.]]])
    """
    scores = problem.weight.abs() * problem.norms.unsqueeze(1)
    if not isinstance(pattern, Unstructured):
        return torch.where(problem.mask(scores, pattern), problem.weight, 0)
    rows = torch.where(problem.free, scores, -1)
    ranks = rows.argsort(-1).argsort(-1)
    return torch.where((ranks >= round(pattern.sparsity * rows.shape[-1])) & problem.free, problem.weight, 0)
