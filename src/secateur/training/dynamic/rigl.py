"""RigL: the smallest weights go, those come whose gradient is largest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.training.dynamic.method import Layer
from secateur.training.dynamic.regrowth import SET


@dataclass(frozen=True)
class RigL(SET):
    """Every `every` steps until step `end`, the smallest weights are replaced by those with the largest gradients.

    >>> RigL(0.9, every=100, end=1000).wants_gradient(100), RigL(0.9, every=100, end=1000).wants_gradient(101)
    (True, False)

    Evci et al., "Rigging the lottery: making all tickets winners" (2020).
    """

    def wants_gradient(self, step: int) -> bool:
        """Where something is replaced."""
        return self.due(step)

    def wish(self, layer: Layer, chance: torch.Generator) -> Tensor:
        """The size of the gradient that the weight would have."""
        assert layer.gradient is not None
        return layer.gradient.abs() + torch.finfo(layer.gradient.dtype).tiny
