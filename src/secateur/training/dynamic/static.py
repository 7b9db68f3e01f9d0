"""Masks at random that never change: what others are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from secateur.arguments import a_number, an_instance, check_fields
from secateur.errors import TrainingError
from secateur.sparse.distribution import ERK, Distribution
from secateur.training.dynamic.method import Layer, SparseMethod


@dataclass(frozen=True)
class Static(SparseMethod):
    """A random part of each weight, for good.

    >>> Static(0.9)
    Static(sparsity=0.9, distribution=ERK())
    """

    sparsity: float = 0.9
    distribution: Distribution = field(default_factory=ERK)

    def __post_init__(self) -> None:
        spread = an_instance(Distribution, "ERK() or Uniform()")
        check_fields(self, TrainingError, sparsity=a_number(least=0, below=1), distribution=spread)

    def start(self, layers: Sequence[Layer], chance: torch.Generator) -> list[Tensor]:
        """At random, as many as the distribution says."""
        masks = self.distribution.random([layer.weight.shape for layer in layers], self.sparsity, chance)
        return [mask.to(layer.weight.device) for mask, layer in zip(masks, layers, strict=True)]

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def change(self, layers: Sequence[Layer], step: int, chance: torch.Generator) -> list[Tensor]:
        """What they are."""
        return [layer.mask for layer in layers]
