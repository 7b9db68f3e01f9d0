"""Movement pruning: what moves towards zero goes, whatever its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.training.dynamic.gradual import GMP
from secateur.training.dynamic.method import Layer


@dataclass(frozen=True)
class Movement(GMP):
    """The schedule of `GMP`, with weights ranked by the sum of -gradient · weight over all steps.

    >>> Movement(0.8, begin=100, end=1000).scored
    True

    A weight that training makes larger has a positive sum. What is gone may come back, with the value that it had.
    Sanh, Wolf and Rush, "Movement pruning" (2020).
    """

    scored = True

    def wants_gradient(self, step: int) -> bool:
        """In every step until the masks are final."""
        return step <= self.end

    def change(self, layers: Sequence[Layer], step: int, chance: torch.Generator) -> list[Tensor]:
        """Those with the largest sums stay."""
        ranked = []
        for layer in layers:
            assert layer.score is not None
            positive = layer.score - layer.score.min()
            every = torch.ones_like(layer.mask)
            ranked.append(Layer(layer.name, positive, every, inputs=layer.inputs))
        return super().change(ranked, step, chance)
