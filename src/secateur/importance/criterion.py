"""What criteria have in common: they score axes, and can be weighed and added."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from secateur.arguments import is_finite, shown
from secateur.distributed import is_sharded
from secateur.errors import PlanError
from secateur.importance.scope import Normalisation, check_normalisation, normalised
from secateur.importance.weights import Context, Importance, Weights
from secateur.tracing.graph import Axis


class Criterion(ABC):
    """A function from a `Context` to one score per position of its axis; the higher, the more a position matters.

    >>> import secateur as sec
    >>> sec.Magnitude() + 0.5 * sec.FPGM()
    Sum((Magnitude(p=2.0), 1.0), (FPGM(p=2.0), 0.5), normalise='mean')

    Sums take each criterion at its mean over the axis, so that units do not matter. Any function will do for a term.
    """

    comparable: ClassVar[bool] = False  # whether scores are in the same unit on every axis

    @abstractmethod
    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""

    def scores(self, weights: Weights) -> Mapping[Axis, Tensor]:
        """A score per position of every axis."""
        return {axis: self(weights.context(axis)) for axis in weights.axes}

    def __add__(self, other: Importance) -> Sum:
        return Sum(*_terms(self), *_terms(other)) if callable(other) else NotImplemented

    def __radd__(self, other: Importance) -> Sum:
        return Sum(*_terms(other), *_terms(self)) if callable(other) else NotImplemented

    def __mul__(self, weight: float) -> Sum:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            return NotImplemented
        return Sum(*((criterion, weight * own) for criterion, own in _terms(self)))

    __rmul__ = __mul__


class JointCriterion(Criterion):
    """A criterion that scores all axes at once, such as one that runs the model on data.

    Called with the context of one axis, as by a function of the user's, it scores all that are scored with that one
    and remembers them for the next.
    """

    @abstractmethod
    def scores(self, weights: Weights) -> Mapping[Axis, Tensor]:
        """A score per position of every axis."""

    def __call__(self, context: Context) -> Tensor:
        known = context.weights.known
        if uses_data(self) and is_sharded(context.weights.model):
            raise PlanError(
                f"{type(self).__name__} runs the model on data, and that is spread over ranks: give plan the criterion "
                "itself, not a function that calls it, so that the model is put together first"
            )
        if self not in known:
            known[self] = self.scores(context.weights)
        return known[self][context.axis]


def scored(importance: Importance, weights: Weights) -> Mapping[Axis, Tensor]:
    """What a criterion, or a function of a `Context`, gives to every axis."""
    if isinstance(importance, Criterion):
        return importance.scores(weights)
    return {axis: importance(weights.context(axis)) for axis in weights.axes}


@dataclass(frozen=True, init=False, repr=False)
class Sum(JointCriterion):
    """Criteria added up, each with a weight, each at its own scale.

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> both = Sum((sec.Magnitude(), 0.5), (sec.FPGM(), 0.5))
    >>> len(sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Ratio(0.5), importance=both).axes[0].keep)
    4

    The scores of a term are divided by their mean over the axis (`normalise`: "mean", "max", "sum" or "none") before
    they are weighed. `0.5 * Magnitude() + 0.5 * FPGM()` is the same.
    """

    terms: tuple[tuple[Importance, float], ...]
    normalise: Normalisation = "mean"

    def __init__(self, *terms: tuple[Importance, float], normalise: Normalisation = "mean") -> None:
        if not terms:
            raise PlanError("Sum takes at least one (criterion, weight)")
        for term in terms:
            _check(term)
        check_normalisation(normalise)
        object.__setattr__(self, "terms", terms)
        object.__setattr__(self, "normalise", normalise)

    def __repr__(self) -> str:
        terms = "".join(f"({criterion!r}, {weight!r}), " for criterion, weight in self.terms)
        return f"Sum({terms}normalise={self.normalise!r})"

    def scores(self, weights: Weights) -> dict[Axis, Tensor]:
        """Σ weight · scores over their scale."""
        total = {axis: torch.zeros(axis.size, dtype=torch.float64) for axis in weights.axes}
        for criterion, weight in self.terms:
            for axis, scores in scored(criterion, weights).items():
                if not isinstance(scores, Tensor) or scores.shape != total[axis].shape:
                    shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                    raise PlanError(f"{criterion!r} must give {axis.name} {axis.size} scores, not {shape}")
                total[axis] += weight * normalised(scores, self.normalise)
        return total


def uses_data(importance: Importance) -> bool:
    """Whether a criterion, or some term of it, runs the model on batches.

    >>> import secateur as sec
    >>> uses_data(sec.Magnitude()), uses_data(sec.Magnitude() + sec.Activation([]))
    (False, True)
    """
    if isinstance(importance, Sum):
        return any(uses_data(criterion) for criterion, _ in importance.terms)
    return hasattr(importance, "batches")


def _terms(criterion: Importance) -> tuple[tuple[Importance, float], ...]:
    """The terms that a criterion adds to a sum that takes means."""
    if isinstance(criterion, Sum) and criterion.normalise == "mean":
        return criterion.terms
    return ((criterion, 1.0),)


def _check(term: object) -> None:
    if not isinstance(term, tuple) or len(term) != 2 or not callable(term[0]):
        pair = "a term is a pair of a criterion and a weight, such as (Magnitude(), 0.5)"
        raise PlanError(f"Sum: {pair}, not {shown(term)}")
    if not is_finite(term[1]):
        raise PlanError(f"Sum: the weight of {shown(term[0])} is a finite number, not {shown(term[1])}")
