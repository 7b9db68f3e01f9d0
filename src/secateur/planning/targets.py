"""What a plan aims at. A target turns a problem (axes, scores, costs) into what each axis keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

from secateur.arguments import Rule, a_number, check, shown
from secateur.axes import Polynomial
from secateur.errors import PlanError
from secateur.importance import PerAxis
from secateur.planning.allocation import AxisCounts, Cost, Limit, allocate
from secateur.planning.amounts import BYTES, COUNT, Unit
from secateur.planning.factors import leading, only_if_named
from secateur.planning.names import Makers, glob_of, named
from secateur.planning.problem import Chosen, CountedCost, PruningProblem, check_values
from secateur.planning.reasons import kept_more, some
from secateur.planning.zeros import dead_positions, nearly_dead
from secateur.tracing.graph import Axis, Graph

_USED_UP = 0.97  # the part of a budget that is enough
_FEWEST = (0.1, 0.0)  # of an axis: first none is cut below a tenth, then down to one position if that must be


class Target(Protocol):
    """Anything with a `choose` is a target: it says which positions stay of each axis that is cut, sorted."""

    def choose(self, problem: PruningProblem) -> Mapping[Axis, Tensor]: ...


def target_of(given: object) -> Target:
    """What was asked for as a target: a mapping gives ratios by glob, a tuple budgets that all hold."""
    if isinstance(given, Mapping):
        return Ratio(given)
    if isinstance(given, tuple) and given:
        return Budgets.of(*given)
    if isinstance(given, type) or not hasattr(given, "choose"):
        kinds = "Ratio(r), Macs(f), Params(f), Bytes(f), Latency(f) or Zeros()"
        raise PlanError(f"a target is {kinds}, not {shown(given)}")
    return given


_FRACTION = Rule("a fraction from 0 up to, not including, 1", a_number(least=0, below=1).holds)


@dataclass(frozen=True)
class Ratio:
    """Remove the fraction `ratio` of every dimension.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> len(sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Ratio(0.25)).axes[0].keep)
    6

    A mapping gives ratios by part of the model: a module or its name, a parameter's name, a glob over names, or an
    axis's name as `print(graph)` shows it: `Ratio({"layer4.*": 0.3})`. It means the layers whose outputs go; where
    several put out the same axis, as all that add to a residual stream do, that is the first of them. The first part
    that means an axis counts, and an axis that none means stays whole. With a `scope` other than each axis by itself,
    a number is the fraction of all positions together that goes.

    Where several axes make up one dimension, one of them is cut: whole heads (kv heads) rather than head dims, channels
    rather than groups. To cut another, or rotary pairs, name the axis: `Ratio({"*head dims": 0.5})`.
    """

    ratio: float | Mapping[Any, float]  # by `Named`

    def __post_init__(self) -> None:
        if isinstance(self.ratio, Mapping) and not self.ratio:
            raise PlanError("Ratio: ratio is empty, a target that cuts nothing; name parts, as in {'layer4.*': 0.3}")
        for value in self.ratio.values() if isinstance(self.ratio, Mapping) else (self.ratio,):
            check("Ratio", PlanError, {"ratio": value}, ratio=_FRACTION)

    def __str__(self) -> str:
        if not isinstance(self.ratio, Mapping):
            return f"Ratio({self.ratio})"
        return f"Ratio({ {k if isinstance(k, str) else type(k).__name__: v for k, v in self.ratio.items()} })"

    def by_axis(self, graph: Graph) -> dict[Axis, float]:
        """The ratio of each axis of a graph."""
        if not isinstance(self.ratio, Mapping):
            return dict.fromkeys(graph.axes, self.ratio)
        by_glob = [(glob_of(part, graph, "Ratio"), value) for part, value in self.ratio.items()]
        makers = Makers(graph)
        for glob, _ in by_glob:
            if not any(makers.means(glob, axis) for axis in graph.axes):
                raise PlanError(f"Ratio: {_means_nothing(glob, graph, makers)}")
        return {axis: next((value for glob, value in by_glob if makers.means(glob, axis)), 0.0) for axis in graph.axes}

    def named(self, graph: Graph) -> set[Axis]:
        """The axes that are meant by their own names, not by those of layers."""
        globs = [glob_of(part, graph, "Ratio") for part in self.ratio] if isinstance(self.ratio, Mapping) else []
        makers = Makers(graph)
        return {axis for axis in graph.axes if any(makers.by_name(glob, axis) for glob in globs)}

    def shares(self, problem: PruningProblem) -> tuple[dict[Axis, float], dict[Axis, float]]:
        """The ratio of each axis that is cut, and of each that may be cut instead where sizes want it so."""
        asked = {axis: ratio for axis, ratio in self.by_axis(problem.graph).items() if ratio}
        named = self.named(problem.graph) & asked.keys()
        cut = named | leading(problem.graph, [axis for axis in problem.axes if axis in asked], named)
        cut |= asked.keys() - problem.axes  # these stay whole, which is said
        instead = {axis: ratio for axis, ratio in asked.items() if axis in cut or not only_if_named(axis)}
        return {axis: asked[axis] for axis in cut}, instead

    def choose(self, problem: PruningProblem) -> Chosen:
        """The best-scored positions of each axis."""
        ratios, instead = self.shares(problem)
        if problem.scope is None or isinstance(self.ratio, Mapping):
            counts = problem.counts(lambda axis: ratios.get(axis, 0.0), lambda axis: instead.get(axis, 0.0))
            chosen = problem.best(counts)
            chosen.why = kept_more(problem, ratios, counts)
            return chosen
        few = problem.among(ratios)
        positions = CountedCost(Polynomial([(1, (axis.atom,)) for axis in few.axes]))
        limit = Limit(str(self), positions, positions({}) * (1 - self.ratio))
        return problem.best(within(few, (limit,)))


def _means_nothing(glob: str, graph: Graph, makers: Makers) -> str:
    """What is wrong with a glob that means no axis."""
    if others := list(makers.instead(glob, graph.axes)):
        return f"no axis is what {glob!r} puts out: {some(others)}. Name the layer that puts it out, or the axis"
    if any(named(name, glob) for name in graph.layouts):
        held = {blocked.reason for blocked in graph.blocked if named(blocked.tensor, glob)}
        return f"nothing of {glob!r} can be cut: {some(sorted(held))}"
    return f"no axis and no tensor matches {glob!r}; print(graph) shows the names"


@dataclass(frozen=True, repr=False)
class Budget:
    """Keep at most a fraction of something, or a number of it. `a & b` keeps both.

    >>> import secateur as sec
    >>> sec.Macs(0.5) & sec.Params("20M")
    Macs(0.5) & Params('20M')
    """

    amount: float | str
    unit: ClassVar[Unit] = COUNT
    measured: ClassVar[bool] = False  # by running models, with another result each time

    def __post_init__(self) -> None:
        self.unit.read(self.amount, type(self).__name__)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.amount!r})"

    @property
    def absolute(self) -> bool:
        """Whether it is a number of its own, not a fraction."""
        return self.unit.read(self.amount, type(self).__name__)[1]

    def share(self, whole: float) -> float:
        """The fraction of a whole that is allowed; 1 where that is more than there is."""
        amount, absolute = self.unit.read(self.amount, type(self).__name__)
        return min(amount / max(whole, 1e-30), 1.0) if absolute else amount

    def at(self, share: float) -> Self:
        """The same budget with another fraction."""
        share = min(share, 1.0)
        return replace(self, amount=share if share >= self.unit.fractions_from else f"{100 * share!r}%")

    def __and__(self, other: object) -> Budgets:
        return Budgets.of(self, other)

    def cost(self, problem: PruningProblem) -> Cost:
        """What is kept within the budget."""
        raise NotImplementedError

    def limit(self, problem: PruningProblem) -> Limit:
        """The budget as a number."""
        cost = self.cost(problem)
        return Limit(str(self), cost, cost({}) * self.share(cost({})))

    def choose(self, problem: PruningProblem, beside: Sequence[Limit] = ()) -> Chosen:
        """The best positions that fit, within this budget and others beside it."""
        return problem.best(within(unnamed(problem), (self.limit(problem), *beside)))


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

    def choose(self, problem: PruningProblem) -> Chosen:
        """The best positions that fit. A budget with a way of its own to choose leads; the others hold beside it."""
        own = [part for part in self.parts if type(part).choose is not Budget.choose]
        leading = (own or self.parts)[0]
        return leading.choose(problem, [part.limit(problem) for part in self.parts if part is not leading])


def is_measured(target: Target) -> bool:
    """Whether a target is met by measuring.

    >>> is_measured(Macs(0.5) & Params(0.5))
    False
    """
    budgets = target.parts if isinstance(target, Budgets) else (target,)
    return any(isinstance(budget, Budget) and budget.measured for budget in budgets)


def unnamed(problem: PruningProblem) -> PruningProblem:
    """What a budget decides about: every axis that need not be named to be cut."""
    return problem.among([axis for axis in problem.axes if not only_if_named(axis)])


def within(problem: PruningProblem, limits: Sequence[Limit]) -> dict[Axis, int]:
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
        found = allocate(problem.ladders(limits, fewest), limits)
        if found is not None:
            if found.used < _USED_UP:  # axes that depend on each other went further than they had to
                mixed = allocate(problem.ladders(limits, fewest, mixed=True), limits)
                found = min((one for one in (found, mixed) if one is not None), key=lambda one: one.lost)
            return found.counts
    return _uniform(problem, limits)


def _uniform(problem: PruningProblem, limits: Sequence[Limit]) -> dict[Axis, int]:
    """The smallest ratio that respects every limit, of one factor of each dimension if that is enough, else of all
    axes; with what that leaves given back."""
    few = problem.among(leading(problem.graph, problem.axes))
    least = few.counts(lambda _: 1.0)
    if len(few.axes) < len(problem.axes) and all(limit.cost(least) <= limit.limit for limit in limits):
        return {axis: axis.size for axis in problem.axes} | _uniform(few, limits)

    def used(counts: AxisCounts) -> float:
        """The part of its limit that the tightest one takes."""
        return max(limit.cost(counts) / limit.limit for limit in limits)

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        fits = used(problem.counts(lambda _, ratio=middle: ratio)) <= 1  # type: ignore[misc]
        low, high = (low, middle) if fits else (middle, high)
    return problem.fit(high, used, 1.0)  # type: ignore[arg-type]


@dataclass(frozen=True, repr=False)
class Macs(Budget):
    """Keep at most a fraction of the multiply-accumulates, or so many: `Macs(0.5)`, `Macs(500e6)`, `Macs("500M")`.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> plan = sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Macs(0.5))
    >>> plan.macs.before, plan.macs.after
    (64, 32)
    """

    def cost(self, problem: PruningProblem) -> Cost:
        """Multiply-accumulates of one run on the example."""
        return problem.macs


@dataclass(frozen=True, repr=False)
class Params(Budget):
    """Keep at most a fraction of the parameters, or so many: `Params(0.5)`, `Params(20e6)`, `Params("20M")`.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> plan = sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Params(0.5))
    >>> plan.params.before, plan.params.after
    (76, 31)
    """

    def cost(self, problem: PruningProblem) -> Cost:
        """Parameters, tied ones once."""
        return problem.params


@dataclass(frozen=True, repr=False)
class Bytes(Budget):
    """Keep at most a fraction of the bytes that the parameters take, or so many: `Bytes(0.5)`, `Bytes("20MB")`.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Embedding(9, 8, dtype=torch.half), torch.nn.Linear(8, 4, dtype=torch.half))
    >>> plan = sec.plan(sec.trace(net, torch.zeros(1, dtype=torch.long)), Bytes(0.5))
    >>> plan.bytes.before, plan.bytes.after
    (216, 86)
    """

    unit: ClassVar[Unit] = BYTES

    def cost(self, problem: PruningProblem) -> Cost:
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

    def choose(self, problem: PruningProblem) -> Chosen:
        """The positions that are not zero; one stays where all are."""
        check_values(problem.graph, "Zeros()")
        chosen = problem.without(dead_positions(problem.graph, problem.axes))
        chosen.why = some(list(nearly_dead(problem.graph, problem.axes))) or ("" if chosen else "no position is zero")
        return chosen
