"""The way to a target: what to aim at in each round, so that fractions stay those of the uncut model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from secateur.importance import Magnitude
from secateur.plan.problem import Problem
from secateur.plan.targets import Budget, Budgets, Chosen, Ratio, Target
from secateur.schedule.errors import ScheduleError
from secateur.trace.graph import Graph

Course = Callable[[float, Graph], Target]  # the part of the whole cut to have done, and the model as it is now


def course(target: Target | Mapping[str, float], uncut: Graph, parts: Sequence[float]) -> Course:
    """What to aim at on the way from the uncut model to a target.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> way = course(sec.Macs(0.5), graph, [0.5, 1.0])
    >>> way(0.5, graph)
    Macs(fraction=0.75)
    >>> way(1.0, sec.trace(sec.apply(net, sec.plan(graph, sec.Macs(0.75))), torch.zeros(1, 4)))
    Macs(fraction=0.6666666666666666)
    """
    if isinstance(target, Mapping):
        target = Ratio(target)
    if isinstance(target, Ratio):
        return _by_counts(target, uncut)
    if isinstance(target, Budget):
        return _by_cost(target, uncut)
    if isinstance(target, Budgets):
        ways = [_by_cost(part, uncut) for part in target.parts]
        return lambda part, now: Budgets.of(*(way(part, now) for way in ways))
    if not hasattr(target, "choose"):
        raise ScheduleError(f"a target is Ratio(r), Macs(f), Params(f) or the like, not {target!r}")
    if tuple(parts) != (1.0,):
        raise ScheduleError(f"{target!r} cannot be approached in {len(parts)} steps; use schedule.one_shot() with it")
    whole = target
    return lambda part, now: whole


def _by_cost(target: Budget, uncut: Graph) -> Course:
    def cost(graph: Graph) -> float:
        return target.cost(Problem(graph, Magnitude(), exact=False, protect=(), round_to=1))({})

    whole = cost(uncut)

    def aim(part: float, now: Graph) -> Target:
        wanted = whole * (target.fraction + (1 - part) * (1 - target.fraction))
        return replace(target, fraction=min(1.0, wanted / cost(now)))

    return aim


def _by_counts(target: Ratio, uncut: Graph) -> Course:
    removed = {axis.name: (axis.size, target.of(axis)) for axis in uncut.axes}

    def aim(part: float, now: Graph) -> Target:
        return _Leave({name: size - int(size * ratio * part + 1e-9) for name, (size, ratio) in removed.items()})

    return aim


@dataclass(frozen=True)
class _Leave:
    """Leave so many positions of each axis, by its name, and all of an axis that is not named."""

    counts: Mapping[str, int]

    def choose(self, problem: Problem) -> Chosen:
        def ratio(size: int, leave: int) -> float:
            return max(0, size - leave) / size

        return problem.best(problem.counts(lambda a: ratio(a.size, self.counts.get(a.name, a.size))))
