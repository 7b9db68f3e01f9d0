"""The oldest method: the smallest weights go, the others stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from secateur.sparse.patterns import Pattern
from secateur.sparse.problem import Problem


def magnitude(problem: Problem, pattern: Pattern) -> Tensor:
    """|w|, over the whole weight.

    >>> from secateur.sparse.patterns import Unstructured
    >>> magnitude(Problem.of(torch.tensor([[3.0, -1.0]]), torch.eye(2)), Unstructured(0.5))
    tensor([[[3., 0.]]])
    """
    return torch.where(problem.mask(problem.weight.abs(), pattern), problem.weight, 0)
