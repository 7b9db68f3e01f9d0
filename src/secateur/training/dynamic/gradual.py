"""Gradual magnitude pruning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.arguments import an_int, check_fields
from secateur.errors import TrainingError
from secateur.sparse.patterns import Pattern
from secateur.training.dynamic.method import PATTERN, Layer, SparseMethod, pattern_of


def cubic_part(step: int, begin: int, end: int) -> float:
    """How much of the way from `begin` to `end` is done: fast at first, then slower and slower.

    >>> [cubic_part(step, 0, 4) for step in (0, 1, 4, 9)]
    [0.0, 0.578125, 1.0, 1.0]
    """
    return 1 - (1 - min(max((step - begin) / (end - begin), 0.0), 1.0)) ** 3


@dataclass(frozen=True)
class GMP(SparseMethod):
    """The smallest weights of each layer go, more and more of them from step `begin` to step `end`.

    >>> GMP(0.9, begin=0, end=1000, every=100).pattern
    0.9

    `pattern` is a sparsity, or a pattern such as `sec.NM(2, 4)` or `sec.Block(4, 1, 0.9)`, whose sparsity is reached in
    the end. What is gone stays so. Zhu and Gupta, "To prune, or not to prune" (2017).
    """

    pattern: Pattern | float = 0.9
    begin: int = 0
    end: int = 1000
    every: int = 100

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, pattern=PATTERN, begin=an_int(0), end=an_int(0), every=an_int(1))
        if not self.begin < self.end:
            story = f"it would end at step {self.end}, before it begins at step {self.begin}"
            raise TrainingError(f"{type(self).__name__}: {story}; give a later end")

    def due(self, step: int) -> bool:
        """Every so many steps, and at the end."""
        return self.begin <= step <= self.end and ((step - self.begin) % self.every == 0 or step == self.end)

    def change(self, layers: Sequence[Layer], step: int, chance: torch.Generator) -> list[Tensor]:
        """The largest stay, as many as the schedule says."""
        whole = pattern_of(self.pattern)
        now = whole if step == self.end else whole.at(whole.sparsity * cubic_part(step, self.begin, self.end))
        return [now.mask(layer.weight.abs() * layer.mask, layer.inputs) for layer in layers]

    def refuses(self, layer: Layer) -> str | None:
        """Where the pattern does not fit."""
        return pattern_of(self.pattern).fits(layer.weight.shape, layer.inputs)
