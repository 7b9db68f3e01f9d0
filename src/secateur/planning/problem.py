"""What a target decides about: axes that may be cut, their scores, and what any choice would cost."""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from secateur.arguments import FLAG, a_function, an_int, check, shown
from secateur.axes import Atom, Polynomial
from secateur.errors import PlanError, SecateurError
from secateur.importance import Criterion, Importance, Scope, Weights, rank, scored
from secateur.planning.allocation import AxisCounts, Ladder, Limit, Rung, ladder, losses
from secateur.planning.counts import components, settle, settle_group
from secateur.planning.names import Named, named, parts_of, runs_through
from secateur.state.held import named_tensors
from secateur.tracing.equations import Constraint
from secateur.tracing.graph import Axis, Graph

Tied = tuple[list[Axis], list[Atom], list[Constraint]]  # axes, with all atoms and constraints that tie them

_CRITERION = "a function of a Context, such as Magnitude()"
_TIED_RUNGS = 32  # steps in which axes whose counts depend on each other are cut
_USED_UP = 0.995  # the part of a budget that is enough
_HALVINGS = 10  # of the span of ratios in which a group's is looked for


class CostModel:
    """MACs, parameters and bytes of a graph's model for any counts of its axes."""

    def __init__(self, graph: Graph) -> None:
        tensors = {name: graph.source.tensors[name] for name in graph.source.parameters}
        self.macs = Polynomial([(1, cost.layouts) for cost in graph.costs])
        self.params = Polynomial([(1, graph.layouts[name]) for name in tensors])
        self.bytes = Polynomial([(form.dtype.itemsize, graph.layouts[name]) for name, form in tensors.items()])

    @staticmethod
    def of(graph: Graph) -> "CostModel":
        """That of a graph, made once."""
        if graph not in _COSTS:
            _COSTS[graph] = CostModel(graph)
        return _COSTS[graph]


_COSTS: WeakKeyDictionary[Graph, CostModel] = WeakKeyDictionary()


@dataclass(frozen=True)
class CountedCost:
    """A cost that is counted, by what axes keep."""

    polynomial: Polynomial
    smooth: ClassVar[bool] = True

    def __call__(self, counts: AxisCounts) -> int:
        return self.polynomial(by_atom(counts))

    def saved(self, counts: AxisCounts, change: AxisCounts) -> int:
        return self.polynomial.difference(by_atom(counts), by_atom(change))


class Chosen(dict[Axis, Tensor]):
    """What a target decides: the kept positions of each axis that is cut, sorted.

    `confirmation` is what a target that measures its choice has to say about it, `why` why it is less than was asked.
    """

    def __init__(self, kept: Mapping[Axis, Tensor] | None = None, confirmation: Any = None, why: str = "") -> None:
        super().__init__(kept or {})
        self.confirmation = confirmation
        self.why = why


class PruningProblem:
    """The axes of a graph that may be cut, with a score for each position."""

    def __init__(
        self,
        graph: Graph,
        importance: Importance,
        *,
        exact: bool,
        protect: Named | Sequence[Named],
        round_to: int,
        scope: Scope | str | None = None,
    ) -> None:
        rules = {"exact": FLAG, "round_to": an_int(1), "importance": a_function(_CRITERION)}
        check("plan", PlanError, locals(), **rules)
        self.graph = graph
        self.model = graph.model  # refused here, before anything is computed, if it has changed
        self.importance = importance
        self.round_to = round_to
        self.scope = scope
        free = [axis for axis in graph.axes if axis.exact or not exact]
        whole = self._protected(parts_of(protect, graph, "protect"))
        self.axes = tuple(axis for axis in free if axis not in whole)
        held = ((len(graph.axes) - len(free), "not exact, as exact=True wants"), (len(whole), "protected"))
        self.held_back = [f"{number} are {why}" for number, why in held if number]
        self._of_atom = {axis.atom: axis for axis in self.axes}
        self._scores = cache(partial(_scored, graph, importance, self.axes))  # shared by what `among` makes
        costs = CostModel.of(graph)
        self.macs = CountedCost(costs.macs)  # multiply-accumulates of one run on the example
        self.params = CountedCost(costs.params)  # parameters, tied ones once
        self.bytes = CountedCost(costs.bytes)

    def _protected(self, protect: Sequence[str]) -> set[Axis]:
        """The axes that stay whole."""
        for glob in protect:
            through = any(runs_through(glob, axis) for axis in self.graph.axes)
            if not through and not any(named(name, glob) for name in self.graph.layouts):
                raise PlanError(f"protect: no tensor and no axis matches {glob!r}")
        return {axis for axis in self.graph.axes if any(runs_through(glob, axis) for glob in protect)}

    def among(self, axes: Collection[Axis]) -> "PruningProblem":
        """The same problem where only some of the axes may be cut."""
        fewer = copy.copy(self)
        fewer.axes = tuple(axis for axis in self.axes if axis in axes)
        fewer._of_atom = {axis.atom: axis for axis in fewer.axes}
        for learnt in ("tied", "alone"):
            fewer.__dict__.pop(learnt, None)
        return fewer

    # counts ----------------------------------------------------------------------------------------------------

    @cached_property
    def tied(self) -> list[Tied]:
        """The axes whose counts depend on each other, group by group."""
        groups = components(self.graph.equations)
        found = [([self._of_atom[a] for a in atoms if a in self._of_atom], atoms, held) for atoms, held in groups]
        return [tied for tied in found if tied[0]]

    @cached_property
    def alone(self) -> list[Axis]:
        """The axes whose counts depend on no other."""
        tied = {axis for group, _, _ in self.tied for axis in group}
        return [axis for axis in self.axes if axis not in tied]

    def counts(self, ratio: Callable[[Axis], float], instead: Callable[[Axis], float] | None = None) -> dict[Axis, int]:
        """What each axis keeps when the fraction `ratio(axis)` of it should go, with every size coming out right.

        Where that is not possible, `instead(axis)` may go.
        """
        wanted = {axis.atom: self._keep(axis, ratio(axis)) for axis in self.axes}
        spare = {axis.atom: self._keep(axis, instead(axis)) for axis in self.axes} if instead else None
        settled = settle(self.graph.equations, wanted, spare)
        return {self._of_atom[atom]: count for atom, count in settled.items() if atom in self._of_atom}

    def _keep(self, axis: Axis, ratio: float) -> int:
        return self._rounded(axis, axis.size - int(axis.size * ratio + 1e-9))

    def _rounded(self, axis: Axis, keep: int) -> int:
        """At least one position, a multiple of `round_to` where the axis is that large."""
        return min(-(-max(1, keep) // self.round_to) * self.round_to, axis.size)

    def fit(self, ratio: float, cost: Callable[[AxisCounts], int], budget: float) -> dict[Axis, int]:
        """The counts at a ratio that fits, with what the budget leaves given back.

        Axes whose counts depend on each other move together, in large steps: each such group goes back as far as it
        can by itself, then all that depend on no other, until next to nothing is left to give.
        """
        ratios = dict.fromkeys(self.axes, ratio)
        counts = self.counts(ratios.__getitem__)
        for group in (*(group for group, _, _ in self.tied), self.alone):
            if cost(counts) >= _USED_UP * budget:
                break
            low, high = 0.0, ratio
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                trial = ratios | dict.fromkeys(group, middle)
                more = self.counts(trial.__getitem__)
                if cost(more) <= budget:
                    high, ratios, counts = middle, trial, more
                else:
                    low = middle
        for axis in self.alone:
            more = {**counts, axis: min(counts[axis] + self.round_to, axis.size)}
            if cost(more) <= budget:
                counts = more
        return counts

    # budgets ---------------------------------------------------------------------------------------------------

    def ladders(self, limits: Sequence[Limit], least: float, *, mixed: bool = False) -> list[Ladder]:
        """What axes can keep, from all down to the fraction `least`; those whose counts depend on each other as one.

        `mixed`: of these some may keep more than others, which makes more states, and takes longer to find.
        """
        scores = self._comparable(limits)
        ladders = [self._ladder(tied, scores, least, limits if mixed else ()) for tied in self.tied]
        for axis in self.alone:
            fewest = self._rounded(axis, math.ceil(axis.size * least))
            ladders.append(ladder(axis, scores[axis], fewest, self.round_to))
        return ladders

    def _ladder(self, tied: Tied, scores: Mapping[Axis, Tensor], least: float, mixed: Sequence[Limit]) -> Ladder:
        """Axes whose counts depend on each other are cut by the same ratio, as near as sizes allow; with the limits of
        a `mixed` ladder, those of one size may also stay whole, or a step behind."""
        group, atoms, constraints = tied
        lost = {axis: losses(scores[axis]) for axis in group}
        rungs: dict[tuple[int, ...], Rung] = {}

        def add(wanted: Mapping[Axis, int]) -> Rung:
            asked = {axis.atom: count for axis, count in wanted.items()}
            settled = settle_group(self.graph.equations, atoms, constraints, asked)
            counts = {axis: settled.get(axis.atom, axis.size) for axis in group}
            rung = Rung(counts, sum(lost[axis][axis.size - count] for axis, count in counts.items()))
            return rungs.setdefault(tuple(counts.values()), rung)

        sizes = {axis.size for axis in group} if mixed else ()
        above = {axis: axis.size for axis in group}
        for n in range(_TIED_RUNGS + 1):
            wanted = {axis: self._keep(axis, n / _TIED_RUNGS * (1 - least)) for axis in group}
            counts = add(wanted).counts
            if counts != above:
                for size in sizes:
                    for other in ({axis: axis.size for axis in group}, above):
                        add({axis: other[axis] if axis.size == size else count for axis, count in wanted.items()})
                above = dict(counts)
        found = sorted(rungs.values(), key=lambda rung: rung.lost)
        return tuple(_worthwhile(found, mixed)) if mixed else tuple(found)

    def _comparable(self, limits: Sequence[Limit]) -> dict[Axis, Tensor]:
        """Scores that can be compared across axes.

        Where nothing else is said, those of a criterion without a common unit count relative to their axis, and an
        axis as a whole counts as much as it costs: more cannot be told without data.
        """
        scores = {axis: self.scores(axis) for axis in self.axes}
        if self.scope is not None:
            return rank(scores, self.scope, self.graph)
        if isinstance(self.importance, Criterion) and self.importance.comparable:
            return scores
        found = {}
        for axis, own in scores.items():
            worth = sum(limit.cost.saved({}, {axis: 0}) / max(limit.limit, 1e-30) for limit in limits)
            found[axis] = own * (worth / float(own.sum().clamp_min(1e-300)))
        return found

    # positions -------------------------------------------------------------------------------------------------

    def scores(self, axis: Axis) -> Tensor:
        """A score per position of an axis: the higher, the more it matters. All axes are scored at once."""
        return checked(self._scores()[axis], axis)

    def best(self, counts: AxisCounts) -> Chosen:
        """The best-scored positions of each axis, sorted; ties go to the first."""
        return _highest(counts, self.scores)

    def without(self, dead: Mapping[Axis, Tensor]) -> Chosen:
        """Remove the dead positions of each axis, as many as sizes allow."""
        wanted = {axis.atom: self._rounded(axis, axis.size - int(gone.sum())) for axis, gone in dead.items()}
        settled = settle(self.graph.equations, wanted)
        return _highest({axis: settled[axis.atom] for axis in dead}, lambda axis: (~dead[axis]).to(torch.int8))


def _worthwhile(rungs: Sequence[Rung], limits: Sequence[Limit]) -> Iterator[Rung]:
    """Those rungs, from whole to least, that cost less than all that lose less."""
    least = math.inf
    for rung in rungs:
        cost = sum(limit.cost(rung.counts) / max(limit.limit, 1e-30) for limit in limits)
        if cost < least:
            least = cost
            yield rung


def _scored(graph: Graph, importance: Importance, axes: Sequence[Axis]) -> Mapping[Axis, Tensor]:
    try:
        return scored(importance, Weights(graph, axes))
    except SecateurError:
        raise
    except Exception as error:  # a criterion may be any code
        check_values(graph, shown(importance), error)
        story = f"{type(error).__name__}: {error}"
        raise PlanError(f"importance: {shown(importance)} is called with a Context, and failed: {story}") from error


def check_values(graph: Graph, who: str, cause: Exception | None = None) -> None:
    """Refuse to go on for want of values, if the model has none."""
    if any(tensor.is_meta for _, tensor in named_tensors(graph.model)):
        raise PlanError(
            f"{who} reads weights, and the model is on the meta device, where there are none; load them first, or "
            "choose without: importance=Random(seed), or a function of yours that reads no weights"
        ) from cause


def _highest(counts: AxisCounts, scores: Callable[[Axis], Tensor]) -> Chosen:
    orders = {axis: scores(axis).argsort(descending=True, stable=True) for axis, n in counts.items() if n < axis.size}
    return Chosen({axis: order[: counts[axis]].sort().values for axis, order in orders.items()})


def checked(scores: object, axis: Axis) -> Tensor:
    """Refuse scores that are not one finite number per position."""
    if not isinstance(scores, Tensor) or tuple(scores.shape) != (axis.size,):
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise PlanError(f"the importance of {axis.name} must be a tensor of {axis.size} scores, not {shape}")
    if scores.isnan().any():
        raise PlanError(f"the importance of {axis.name} has NaN scores: are there NaN weights in {axis.sites[0]}?")
    return scores.detach().to("cpu", torch.float64)


def by_atom(counts: AxisCounts) -> dict[Atom, int]:
    """Counts of axes as those of their atoms, which layouts are made of."""
    return {axis.atom: count for axis, count in counts.items()}
