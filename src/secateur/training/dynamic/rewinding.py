"""Iterative magnitude pruning with rewinding: how lottery tickets are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.arguments import an_int, check_fields
from secateur.errors import TrainingError
from secateur.sparse.patterns import Pattern
from secateur.training.dynamic.method import PATTERN, Layer, SparseMethod, pattern_of


@dataclass(frozen=True)
class Rewinding(SparseMethod):
    """Rounds of `every` steps; after each the smallest weights go and all others are again what they were at step `to`.

    >>> method = Rewinding(0.9, rounds=2, every=100, to=10)
    >>> [step for step in range(400) if method.comes_back(step)]
    [110, 210]

    The same part of what is left goes in each round. The optimizer's state is reset with the weights, a schedule of its
    rate is yours to reset. Frankle and Carbin, "The lottery ticket hypothesis" (2019); Frankle et al., "Linear mode
    connectivity and the lottery ticket hypothesis" (2020), for `to` above 0.
    """

    pattern: Pattern | float = 0.9
    rounds: int = 3
    every: int = 1000
    to: int = 0

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, pattern=PATTERN, rounds=an_int(1), every=an_int(1), to=an_int(0))

    def keeps_weights(self, step: int) -> bool:
        """At step `to`."""
        return step == self.to

    def comes_back(self, step: int) -> bool:
        """After each round."""
        return step > self.to and (step - self.to) % self.every == 0 and step <= self.to + self.rounds * self.every

    def due(self, step: int) -> bool:
        """After each round."""
        return self.comes_back(step)

    def change(self, layers: Sequence[Layer], step: int, chance: torch.Generator) -> list[Tensor]:
        """The largest of each layer stay."""
        done, whole = (step - self.to) // self.every, pattern_of(self.pattern)
        now = whole if done == self.rounds else whole.at(1 - (1 - whole.sparsity) ** (done / self.rounds))
        return [now.mask(layer.weight.abs() * layer.mask, layer.inputs) for layer in layers]

    def refuses(self, layer: Layer) -> str | None:
        """Where the pattern does not fit."""
        return pattern_of(self.pattern).fits(layer.weight.shape, layer.inputs)
