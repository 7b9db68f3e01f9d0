"""A budget in measured time: predict, cut a copy, time it, correct the prediction until what was asked comes."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from secateur.distributed import agreed, of_first, ranks
from secateur.errors import PlanError, SecateurWarning
from secateur.planning.allocation import AxisCounts, Limit
from secateur.planning.amounts import SECONDS, Unit
from secateur.planning.plans import make_plan
from secateur.planning.problem import Chosen, PruningProblem, by_atom
from secateur.planning.targets import Budget, unnamed, within
from secateur.state.contents import alias
from secateur.state.held import named_tensors
from secateur.surgery import carry_out
from secateur.timing.clock import Clock
from secateur.timing.measure import Comparison, Timing, compare, latency
from secateur.timing.surface import GRAINS, rounded
from secateur.tracing.graph import Axis, Graph

_ROUNDS = 4
_AIM = 0.98  # of what was asked: noise goes both ways, and at most the budget may be used
_ENOUGH = 0.955  # of what was asked: no need to try again
_TOLERANCE = 1.05  # beyond what was asked: said
_FASTER = 0.98  # of the whole: less than this is a gain


@dataclass(frozen=True)
class Line:
    """Seconds of the whole model, from the seconds of its ops.

    >>> Line.at(whole=0.012, ops=0.010)(0.010)
    0.012
    """

    overhead: float
    factor: float

    @staticmethod
    def at(whole: float, ops: float) -> Line:
        """Through one point. Half of what ops do not explain is taken to be there whatever their size."""
        overhead = max(0.0, whole - ops) / 2
        return Line(overhead, (whole - overhead) / ops)

    @staticmethod
    def near(points: Mapping[float, float], goal: float) -> Line:
        """Through the two measured points (ops: whole) around a goal; below all of them, on from the lowest two, but
        not so far that the ops would shrink by more than the square of what is still missing."""
        ordered = sorted(points.items())
        above = next((i for i, (_, whole) in enumerate(ordered) if whole > goal), len(ordered) - 1)
        (x, y), (u, v) = ordered[max(above, 1) - 1], ordered[max(above, 1)]
        factor = (v - y) / (u - x)
        if goal < y:
            factor = max(factor, (y - goal) / (x - x * (goal / y) ** 2))
        return Line(y - factor * x, factor)

    def __call__(self, ops: float) -> float:
        return self.overhead + self.factor * ops


@dataclass(frozen=True)
class Predicted:
    """Seconds of one run for any counts."""

    clock: Clock
    line: Line
    smooth: ClassVar[bool] = False  # it has steps

    def __call__(self, counts: AxisCounts) -> float:
        return self.line(self.clock(by_atom(counts)))

    def saved(self, counts: AxisCounts, change: AxisCounts) -> float:
        return self.line.factor * self.clock.saved(by_atom(counts), by_atom(change))


@dataclass(frozen=True)
class Confirmation:
    """What was asked, what was predicted, and what came: fractions of the uncut model's time."""

    asked: float
    predicted: float
    measured: Comparison

    @property
    def came(self) -> float:
        return self.measured.ratio

    def __str__(self) -> str:
        return f"asked {self.asked:.1%}, predicted {self.predicted:.1%}, came {self.came:.1%}: {self.measured}"

    def verdict(self) -> str | None:
        """What is wrong with it, if anything is."""
        if self.asked < 1 and self.came >= _FASTER:
            return f"the cut model is {'slower' if self.came > 2 - _FASTER else 'no faster'}"
        return "the cut model misses the budget" if self.came > self.asked * _TOLERANCE else None


@dataclass(frozen=True, repr=False)
class Latency(Budget):
    """Keep at most a fraction of the run time, or so many seconds, measured on this machine.

    >>> import secateur as sec
    >>> net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    >>> plan = sec.plan(sec.trace(net, torch.zeros(32, 256)), Latency(0.5))
    >>> 0.1 < plan.macs.after / plan.macs.before < 0.8
    True

    It holds for the example, on the device where the model is, with the present thread count. The ops of the model are
    timed at a few sizes each; that predicts what any choice takes, steps at multiples of 8, 16 or 32 included. The
    choice is then cut out of a copy and timed beside the model; where it misses, the prediction is corrected and the
    choice made again. A cut that makes the model no faster, or misses the budget by more than 5%, gives a warning.

    A number from 0.1 to 1 is a fraction, a smaller one seconds: `Latency(0.008)` are 8 ms. Text says it in any case:
    `Latency("120ms")`, `Latency("5%")`. A model that takes no longer than that already is not cut, which is said.

    In a process group rank 0 measures and decides for all, while the others wait; a model that is spread over ranks is
    timed as a whole.
    """

    unit: ClassVar[Unit] = SECONDS
    measured: ClassVar[bool] = True

    def cost(self, problem: PruningProblem) -> Predicted:
        """Seconds of one run on the example."""
        clock, whole = learnt(problem.graph)
        return Predicted(clock, Line.at(whole.median, clock({})))

    def choose(self, problem: PruningProblem, beside: Sequence[Limit] = ()) -> Chosen:
        """The best positions that fit, once cut and timed: by rank 0, for all."""
        problem = unnamed(problem)
        if ranks() > 1:
            agreed("plan", repr([(axis.name, axis.size) for axis in problem.axes]), of="model")
            for axis in problem.axes[:1]:
                problem.scores(axis)  # and all others: every rank may have to add to them
        chosen = _heard(problem, of_first("plan: times", lambda: _told(problem, self._measured(problem, beside))))
        if (verdict := chosen.confirmation.verdict()) is not None:
            warnings.warn(f"{self}: {verdict} ({chosen.confirmation})", SecateurWarning, stacklevel=3)
        return chosen

    def _measured(self, problem: PruningProblem, beside: Sequence[Limit]) -> Chosen:
        """The same as this process measures it."""
        cost, timing = self.cost(problem), learnt(problem.graph)[1]
        whole, asked = timing.median, self.share(timing.median)
        goal = whole * asked * (_AIM if asked < 1 else 1 + 1e-6)  # rounding is no reason to cut
        trials: list[tuple[AxisCounts, Confirmation]] = []
        points = {cost.clock({}): whole}
        for _ in range(_ROUNDS):
            try:
                counts = within(problem, (Limit(str(self), cost, goal), *beside))
            except PlanError:
                if not trials:
                    raise
                break
            counts = filled(problem, counts, cost, beside)
            if all(count == axis.size for axis, count in counts.items()):
                met = f"{self} is met: the model takes {timing}" if asked == 1 and self.absolute else ""
                return Chosen({}, Confirmation(asked, 1.0, Comparison(timing, timing, 1.0)), met)
            if any(counts == before for before, _ in trials):
                break
            predicted = cost(counts) / whole
            found = Confirmation(asked, predicted, _tried(problem, counts))
            trials.append((counts, found))
            idle = predicted < _ENOUGH * asked  # another budget is the tighter one
            if found.came <= asked and (idle or found.came >= _ENOUGH * asked):
                break
            points[cost.clock(by_atom(counts))] = whole * found.came
            cost = Predicted(cost.clock, Line.near(points, goal))
        best, found = min(trials, key=lambda trial: _distance(trial[1]))
        return Chosen(problem.best(best), found)


def _told(problem: PruningProblem, chosen: Chosen) -> str:
    """What was chosen, for ranks whose problem has the same axes."""
    kept = {number: chosen[axis].tolist() for number, axis in enumerate(problem.axes) if axis in chosen}
    return json.dumps({"kept": kept, "confirmation": asdict(chosen.confirmation), "why": chosen.why})


def _heard(problem: PruningProblem, text: str) -> Chosen:
    """What a rank was told."""
    told = json.loads(text)
    kept = {problem.axes[int(number)]: torch.tensor(positions) for number, positions in told["kept"].items()}
    came = told["confirmation"].pop("measured")
    before, after = Timing(**came["before"]), Timing(**came["after"])
    measured = Comparison(before, after, came["ratio"])
    return Chosen(kept, Confirmation(**told["confirmation"], measured=measured), told["why"])


def filled(problem: PruningProblem, counts: AxisCounts, cost: Predicted, beside: Sequence[Limit]) -> dict[Axis, int]:
    """The counts with every step that is paid for used to its end: more positions of an axis where they cost no time.

    Axes that depend on no other, up to multiples that other budgets allow.
    """
    more = dict(counts)
    for axis in problem.alone:
        for grain in GRAINS:
            up = min(rounded(more[axis], grain), axis.size)
            if up % problem.round_to and up < axis.size:
                continue
            trial = {**more, axis: up}
            free = cost.saved(more, {axis: up}) >= 0
            if free and all(limit.cost(trial) <= limit.limit for limit in beside):
                more = trial
    return more


def _distance(found: Confirmation) -> float:
    """How far from what was asked; too slow counts double."""
    off = found.came / found.asked - 1
    return 2 * off if off > 0 else -off


_learnt: WeakKeyDictionary[Graph, dict[int, tuple[Clock, Timing]]] = WeakKeyDictionary()


def learnt(graph: Graph) -> tuple[Clock, Timing]:
    """The latency model of a graph and the time of its whole model, learnt once for each thread count."""
    known: dict[int, tuple[Clock, Timing]] = _learnt.setdefault(graph, {})
    threads = torch.get_num_threads()
    if threads not in known:
        whole = latency(graph.model, graph.example)
        known[threads] = (Clock.learnt(graph), whole)
    return known[threads]


def _tried(problem: PruningProblem, counts: Mapping[Axis, int]) -> Comparison:
    """Time a copy of the model with the chosen positions beside the model itself."""
    trial = _copy(problem.model)
    carry_out(trial, make_plan(problem.graph, problem.best(counts)))
    return compare(problem.model, trial, problem.graph.example)


def _copy(model: nn.Module) -> nn.Module:
    """A model of its own whose tensors share the model's memory, which a cut does not write to."""
    try:
        return copy.deepcopy(model, {id(tensor): alias(tensor) for _, tensor in named_tensors(model)})
    except Exception as error:  # any code of the user's may run here
        raise PlanError(
            f"Latency times a cut copy of the model, and {type(model).__name__} cannot be copied: "
            f"{type(error).__name__}: {error}. Use Macs or Params, and compare with secateur.latency"
        ) from error
