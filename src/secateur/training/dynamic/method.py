"""What every way to change masks during training has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.errors import TrainingError
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


def check_count(where: str, value: object, least: int = 1) -> None:
    """Refuse what is not a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TrainingError(f"{where} is a whole number from {least} on, not {value!r}")


def check_part(where: str, value: object) -> None:
    """Refuse what is not a part of a whole."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise TrainingError(f"{where} is a number from 0 to below 1, not {value!r}")


def check_span(where: str, begin: object, end: object) -> None:
    """Refuse a schedule that ends before it begins."""
    check_count(f"{where}: begin", begin, 0)
    check_count(f"{where}: end", end, 0)
    if not begin < end:  # type: ignore[operator]
        raise TrainingError(f"{where}: it would end at step {end}, before it begins at step {begin}; give a later end")
