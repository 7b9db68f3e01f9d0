"""What a plan aims at. A target turns a problem (axes, scores, costs) into what each axis keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from secateur.errors import PlanError
from secateur.plan.problem import Problem, matches
from secateur.trace.graph import Axis

Chosen = Mapping[Axis, Tensor]  # the kept positions of each axis that is cut, sorted


class Target(Protocol):
    """Anything with a `choose` is a target."""

    def choose(self, problem: Problem) -> Chosen: ...


def _fraction(value: object, name: str, *, whole: bool) -> None:
    """0 < value <= 1 for a part that is kept; 0 <= value < 1 for one that goes."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not (0 < value <= 1 if whole else 0 <= value < 1):  # type: ignore[operator]
        span = "above 0, at most 1" if whole else "from 0 up to, not including, 1"
        raise PlanError(f"{name} takes a fraction {span}, not {value!r}")


@dataclass(frozen=True)
class Ratio:
    """Remove the fraction `ratio` of every axis.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> len(sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Ratio(0.25)).axes[0].keep)
    6

    A mapping gives ratios by glob, matched with the axis's name and with the tensors that it is part of; the first
    that matches counts, and an axis that none matches stays whole: `Ratio({"layer4.*": 0.3})`.
    """

    ratio: float | Mapping[str, float]

    def __post_init__(self) -> None:
        for value in self.ratio.values() if isinstance(self.ratio, Mapping) else (self.ratio,):
            _fraction(value, "Ratio", whole=False)

    def of(self, axis: Axis) -> float:
        """The ratio of one axis."""
        if not isinstance(self.ratio, Mapping):
            return self.ratio
        return next((value for glob, value in self.ratio.items() if matches(glob, axis)), 0.0)

    def choose(self, problem: Problem) -> Chosen:
        """The best-scored positions of each axis."""
        if isinstance(self.ratio, Mapping):
            for glob in self.ratio:
                if not any(matches(glob, axis) for axis in problem.axes):
                    raise PlanError(f"Ratio: no axis and no tensor matches {glob!r}; print(graph) shows the names")
        return problem.best(problem.counts(self.of))


def _always(ratio: float) -> Callable[[Axis], float]:
    return lambda _: ratio


@dataclass(frozen=True)
class _Budget:
    fraction: float

    def __post_init__(self) -> None:
        _fraction(self.fraction, type(self).__name__, whole=True)

    def cost(self, problem: Problem) -> Callable[[Mapping[Axis, int]], int]:
        raise NotImplementedError

    def choose(self, problem: Problem) -> Chosen:
        """The smallest uniform ratio that fits into the budget."""
        cost = self.cost(problem)
        whole = cost({})
        budget = whole * self.fraction
        low, high = 0.0, 1.0
        least = cost(problem.counts(_always(1.0)))
        if least > budget:
            raise PlanError(
                f"{type(self).__name__}({self.fraction}) cannot be reached: the lowest is {least / whole:.3f}, with "
                "one position left of every axis that may be cut. print(graph) shows what is blocked and why"
            )
        for _ in range(40):
            middle = (low + high) / 2
            fits = cost(problem.counts(_always(middle))) <= budget
            low, high = (low, middle) if fits else (middle, high)
        return problem.best(problem.fit(high, cost, budget))


@dataclass(frozen=True)
class Macs(_Budget):
    """Keep at most the fraction `fraction` of the multiply-accumulates.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> plan = sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Macs(0.5))
    >>> plan.macs.before, plan.macs.after
    (64, 32)
    """

    def cost(self, problem: Problem) -> Callable[[Mapping[Axis, int]], int]:
        return problem.macs


@dataclass(frozen=True)
class Params(_Budget):
    """Keep at most the fraction `fraction` of the parameters.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> plan = sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Params(0.5))
    >>> plan.params.before, plan.params.after
    (76, 31)
    """

    def cost(self, problem: Problem) -> Callable[[Mapping[Axis, int]], int]:
        return problem.params


@dataclass(frozen=True)
class Zeros:
    """Cut every position that is zero already, however that came about.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> _ = sec.prune.ln_structured(net[0], "weight", amount=3, n=1, dim=0)
    >>> net[0].bias.data *= net[0].weight_mask[:, 0]
    >>> len(sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Zeros()).axes[0].keep)
    5

    A position goes when removing it changes nothing: every tensor that makes it is zero there (weight and bias of a
    layer, scale and shift of a norm), or every tensor that reads it is. Masks of `torch.nn.utils.prune`,
    `secateur.prune` and `torch.ao.pruning` count. Axes that are not exact stay whole: there even a zero counts.
    """

    def choose(self, problem: Problem) -> Chosen:
        """The positions that are not zero; one stays where all are."""
        return problem.best_of(problem.dead())
