"""What a plan aims at. A target turns a problem (axes, scores, costs) into what each axis keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from secateur.errors import PlanError
from secateur.importance import PerAxis
from secateur.plan.allocation import Counts, Limit, allocate
from secateur.plan.problem import Problem, matches
from secateur.trace.graph import Axis

_FEWEST = (0.1, 0.0)  # of an axis: first none is cut below a tenth, then down to one position if that must be

Chosen = Mapping[Axis, Tensor]  # the kept positions of each axis that is cut, sorted


class Target(Protocol):
    """Anything with a `choose` is a target."""

    def choose(self, problem: Problem) -> Chosen: ...


def target_of(given: object) -> Target:
    """What was asked for as a target: a mapping gives ratios by glob, a tuple budgets that all hold."""
    if isinstance(given, Mapping):
        return Ratio(given)
    if isinstance(given, tuple):
        return Budgets.of(*given)
    if isinstance(given, type) or not hasattr(given, "choose"):
        raise PlanError(f"a target is Ratio(r), Macs(f), Params(f), Bytes(f), Latency(f) or Zeros(), not {given!r}")
    return given


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
    that matches counts, and an axis that none matches stays whole: `Ratio({"layer4.*": 0.3})`. With a `scope` other
    than each axis by itself, it is the fraction of all positions together that goes.
    """

    ratio: float | Mapping[str, float]

    def __post_init__(self) -> None:
        for value in self.ratio.values() if isinstance(self.ratio, Mapping) else (self.ratio,):
            _fraction(value, "Ratio", whole=False)

    def __str__(self) -> str:
        return f"Ratio({self.ratio})"

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
        if problem.scope is None or isinstance(self.ratio, Mapping):
            return problem.best(problem.counts(self.of))
        places = sum(axis.size for axis in problem.axes)
        limit = Limit(str(self), _places(problem.axes), places * (1 - self.ratio))
        return problem.best(within(problem, (limit,)))


def _places(axes: Sequence[Axis]) -> Callable[[Counts], float]:
    """How many positions all axes keep together."""
    return lambda counts: sum(counts.get(axis, axis.size) for axis in axes)


@dataclass(frozen=True)
class Budget:
    """Keep at most a fraction of something. `a & b` keeps both.

    >>> import secateur as sec
    >>> sec.Macs(0.5) & sec.Params(0.6)
    Macs(fraction=0.5) & Params(fraction=0.6)
    """

    fraction: float

    def __post_init__(self) -> None:
        _fraction(self.fraction, type(self).__name__, whole=True)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.fraction})"

    def __and__(self, other: object) -> Budgets:
        return Budgets.of(self, other)

    def cost(self, problem: Problem) -> Callable[[Counts], float]:
        """What is kept within the budget."""
        raise NotImplementedError

    def limit(self, problem: Problem) -> Limit:
        """The budget as a number."""
        cost = self.cost(problem)
        return Limit(str(self), cost, cost({}) * self.fraction)

    def choose(self, problem: Problem, beside: Sequence[Limit] = ()) -> Chosen:
        """The best positions that fit, within this budget and others beside it."""
        return problem.best(within(problem, (self.limit(problem), *beside)))


@dataclass(frozen=True, repr=False)
class Budgets:
    """Several budgets at once: every one of them holds."""

    parts: tuple[Budget, ...]

    @staticmethod
    def of(*parts: object) -> Budgets:
        """Budgets and budgets of budgets, as one."""
        flat: list[Budget] = []
        for part in parts:
            if not isinstance(part, Budget | Budgets):
                raise PlanError(f"only budgets can be combined, such as Macs(0.5) & Params(0.6); {part!r} is none")
            flat += part.parts if isinstance(part, Budgets) else (part,)
        return Budgets(tuple(flat))

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts))

    def __str__(self) -> str:
        return " & ".join(map(str, self.parts))

    def __and__(self, other: object) -> Budgets:
        return Budgets.of(self, other)

    def choose(self, problem: Problem) -> Chosen:
        """The best positions that fit. A budget with a way of its own to choose leads; the others hold beside it."""
        own = [part for part in self.parts if type(part).choose is not Budget.choose]
        leading = (own or self.parts)[0]
        return leading.choose(problem, [part.limit(problem) for part in self.parts if part is not leading])


def within(problem: Problem, limits: Sequence[Limit]) -> dict[Axis, int]:
    """Counts that respect every limit and lose as little importance as possible; one ratio for all if the scope is."""
    least = problem.counts(lambda _: 1.0)
    for limit in limits:
        if limit.cost(least) > limit.limit:
            raise PlanError(
                f"{limit.name} cannot be reached: the lowest is {limit.cost(least) / limit.cost({}):.3f}, with one "
                "position left of every axis that may be cut. print(graph) shows what is blocked and why"
            )
    if problem.scope == "axis" or isinstance(problem.scope, PerAxis):
        return _uniform(problem, limits)
    for fewest in _FEWEST:
        counts = allocate(problem.ladders(limits, fewest), limits)
        if counts is not None:
            return counts
    return _uniform(problem, limits)


def _uniform(problem: Problem, limits: Sequence[Limit]) -> dict[Axis, int]:
    """The smallest ratio for all axes that respects every limit, with what that leaves given back."""

    def used(counts: Counts) -> float:
        """The part of its limit that the tightest one takes."""
        return max(limit.cost(counts) / limit.limit for limit in limits)

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        fits = used(problem.counts(lambda _, ratio=middle: ratio)) <= 1  # type: ignore[misc]
        low, high = (low, middle) if fits else (middle, high)
    return problem.fit(high, used, 1.0)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Macs(Budget):
    """Keep at most the fraction `fraction` of the multiply-accumulates.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> plan = sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Macs(0.5))
    >>> plan.macs.before, plan.macs.after
    (64, 32)
    """

    def cost(self, problem: Problem) -> Callable[[Counts], float]:
        """Multiply-accumulates of one run on the example."""
        return problem.macs


@dataclass(frozen=True)
class Params(Budget):
    """Keep at most the fraction `fraction` of the parameters.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> plan = sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Params(0.5))
    >>> plan.params.before, plan.params.after
    (76, 31)
    """

    def cost(self, problem: Problem) -> Callable[[Counts], float]:
        """Parameters, tied ones once."""
        return problem.params


@dataclass(frozen=True)
class Bytes(Budget):
    """Keep at most the fraction `fraction` of the bytes that the parameters take.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Embedding(9, 8, dtype=torch.half), torch.nn.Linear(8, 4, dtype=torch.half))
    >>> plan = sec.plan(sec.trace(net, torch.zeros(1, dtype=torch.long)), Bytes(0.5))
    >>> plan.bytes.before, plan.bytes.after
    (216, 86)
    """

    def cost(self, problem: Problem) -> Callable[[Counts], float]:
        """Bytes of the parameters, tied ones once."""
        return problem.bytes


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
