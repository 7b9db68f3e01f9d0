"""N:M sparsity from the start, with the sparse-refined straight-through estimator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from secateur.arguments import a_number, check_fields
from secateur.errors import TrainingError
from secateur.sparse.patterns import NM, Pattern
from secateur.training.dynamic.method import PATTERN, Layer, SparseMethod, pattern_of


@dataclass(frozen=True)
class SRSTE(SparseMethod):
    """The pattern holds in every step; masked weights learn as if they were used, and decay.

    >>> SRSTE().pattern, SRSTE().straight_through
    (NM(n=2, m=4), 0.0002)

    Zhou et al., "Learning N:M fine-grained structured sparse neural networks from scratch" (2021).
    """

    pattern: Pattern | float = field(default_factory=NM)
    decay: float = 2e-4

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, pattern=PATTERN, decay=a_number(least=0, below=1e6))

    @property
    def straight_through(self) -> float:  # type: ignore[override]
        """The decay."""
        return float(self.decay)

    def start(self, layers: Sequence[Layer], chance: torch.Generator) -> list[Tensor]:
        """The largest of each group."""
        return [pattern_of(self.pattern).mask(layer.weight.abs(), layer.inputs) for layer in layers]

    def due(self, step: int) -> bool:
        """After every step."""
        return True

    def change(self, layers: Sequence[Layer], step: int, chance: torch.Generator) -> list[Tensor]:
        """The largest of each group, whatever they were before."""
        return self.start(layers, chance)

    def wants_gradient(self, step: int) -> bool:
        """In every step."""
        return True

    def refuses(self, layer: Layer) -> str | None:
        """Where the pattern does not fit."""
        return pattern_of(self.pattern).fits(layer.weight.shape, layer.inputs)
