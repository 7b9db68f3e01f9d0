"""What every way to change masks during training has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.arguments import Rule, a_number
from secateur.sparse.patterns import Pattern, Unstructured, smallest_dropped


@dataclass(frozen=True)
class Layer:
    """A weight with a mask, as a method sees it."""

    name: str
    weight: Tensor  # with what is masked, too
    mask: Tensor  # True where it is computed with
    gradient: Tensor | None = None  # of the masked weight, entries that are masked too, where the method asks for it
    score: Tensor | None = None  # the sum of -gradient · weight over all steps, where the method asks for it
    inputs: int = 1  # the dimension of what is summed over


class SparseMethod(ABC):
    """How masks begin, and what they are after a step.

    A method is a value: it holds no state. `start` and `change` return one mask per layer, True where a weight stays.
    """

    regrown_at_zero = False  # whether a weight that comes back begins at zero; else with what it was
    straight_through: float | None = None  # masked weights learn, too, with a decay of this strength
    scored = False  # whether layers have a score

    def start(self, layers: Sequence[Layer], chance: torch.Generator) -> list[Tensor]:
        """The masks before the first step: nothing is masked, if a method does not say otherwise."""
        return [torch.ones_like(layer.mask) for layer in layers]

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether masks change after a step, from 1 on."""

    @abstractmethod
    def change(self, layers: Sequence[Layer], step: int, chance: torch.Generator) -> list[Tensor]:
        """The masks after a step at which they change."""

    def wants_gradient(self, step: int) -> bool:
        """Whether `change` after a step looks at gradients."""
        return False

    def keeps_weights(self, step: int) -> bool:
        """Whether the weights after a step, or 0 for those at the start, are those to come back to."""
        return False

    def comes_back(self, step: int) -> bool:
        """Whether all weights are what was kept, after the masks have changed at a step."""
        return False

    def refuses(self, layer: Layer) -> str | None:
        """Why a layer cannot be trained by this method."""
        return None


def pattern_of(given: Pattern | float) -> Pattern:
    """A pattern, or one that has zeros anywhere for a number."""
    return given if isinstance(given, Pattern) else Unstructured(given)


def largest(scores: Tensor, count: int) -> Tensor:
    """True for the `count` largest scores, which are zero or more.

    >>> largest(torch.tensor([3.0, 1.0, 2.0]), 2)
    tensor([ True, False,  True])
    """
    return smallest_dropped(scores, scores.numel() - count)


PATTERN = Rule(
    "a pattern, such as NM(2, 4), or the fraction of zeros from 0 to below 1",
    lambda given: isinstance(given, Pattern) or a_number(least=0, below=1).holds(given),
)
