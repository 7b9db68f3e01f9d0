"""Sparse evolutionary training: the smallest weights go, as many others come at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.arguments import a_number, an_int, check_fields
from secateur.errors import TrainingError
from secateur.training.dynamic.method import Layer, largest
from secateur.training.dynamic.static import Static


@dataclass(frozen=True)
class SET(Static):
    """Every `every` steps until step `end`, a part of the weights of each layer is replaced by others at random.

    >>> SET(0.9, every=100, end=1000).replaced(0), SET(0.9, every=100, end=1000).replaced(500)
    (0.3, 0.15)

    The part falls from `drop` to zero like a cosine. Those that go are the smallest; those that come begin at zero.
    Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse connectivity" (2018).
    """

    every: int = 100
    end: int = 1000
    drop: float = 0.3
    regrown_at_zero = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, TrainingError, every=an_int(1), end=an_int(1), drop=a_number(least=0, below=1))

    def replaced(self, step: int) -> float:
        """The part of the weights that is replaced at a step."""
        return round(self.drop / 2 * (1 + math.cos(math.pi * min(step / self.end, 1.0))), 12)

    def due(self, step: int) -> bool:
        """Whether anything is replaced after a step."""
        return step % self.every == 0 and step < self.end

    def change(self, layers: Sequence[Layer], step: int, chance: torch.Generator) -> list[Tensor]:
        """As many come as go."""
        return [self._changed(layer, self.replaced(step), chance) for layer in layers]

    def _changed(self, layer: Layer, part: float, chance: torch.Generator) -> Tensor:
        alive = int(layer.mask.sum())
        count = min(round(part * alive), layer.mask.numel() - alive)
        kept = largest((layer.weight.abs() + torch.finfo(layer.weight.dtype).tiny) * layer.mask, alive - count)
        wish = self.wish(layer, chance).masked_fill(layer.mask, 0.0)  # what was there before does not come at once
        return kept | largest(wish, count)

    def wish(self, layer: Layer, chance: torch.Generator) -> Tensor:
        """How much each weight is wanted back: above zero."""
        return 1e-6 + torch.rand(layer.mask.shape, generator=chance).to(layer.weight.device)
