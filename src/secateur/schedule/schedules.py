"""Schedules: plain functions from a step (1, 2, …) to how much of the whole cut is done by then, from 0 to 1.

With a target they make a course: what to aim at in each round, so that fractions stay those of the uncut model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from secateur.arguments import Rule, an_int, check, is_finite, shown
from secateur.errors import ScheduleError
from secateur.importance import Magnitude
from secateur.planning.problem import Chosen, PruningProblem
from secateur.planning.targets import Budget, Budgets, Ratio, Target, target_of
from secateur.tracing.graph import Axis, Graph

Schedule = Callable[[int], float]
Course = Callable[[float, Graph], Target]  # the part of the whole cut to have done, and the model as it is now

_MOST_STEPS = 1000
_STEPS = Rule(f"a number of steps from 1 to {_MOST_STEPS}", an_int(1, _MOST_STEPS).holds)
_CLOSE = 1e-9  # to one: what rounding may leave of a sum


def one_shot() -> Schedule:
    """All at once.

    >>> one_shot()(1)
    1.0
    """
    return linear(1)


def linear(steps: int) -> Schedule:
    """The same amount in each step.

    >>> [linear(4)(step) for step in (1, 2, 3, 4)]
    [0.25, 0.5, 0.75, 1.0]
    """
    check("linear", ScheduleError, locals(), steps=_STEPS)
    return lambda step: min(step / steps, 1.0)


def cubic(steps: int) -> Schedule:
    """Fast at first, while there is much that matters little, then slower and slower.

    >>> [cubic(4)(step) for step in (1, 2, 3, 4)]
    [0.578125, 0.875, 0.984375, 1.0]

    The gradual pruning of Zhu and Gupta, "To prune, or not to prune" (2017).
    """
    check("cubic", ScheduleError, locals(), steps=_STEPS)
    return lambda step: 1 - (1 - min(step / steps, 1.0)) ** 3


def levels(schedule: Schedule) -> tuple[float, ...]:
    """What a schedule says step by step, up to and including the first that is one.

    >>> levels(lambda step: step / 2)
    (0.5, 1.0)
    """
    if not callable(schedule):
        raise ScheduleError(f"a schedule is a function of a step, such as schedule.cubic(5), not {shown(schedule)}")
    found: list[float] = []
    for step in range(1, _MOST_STEPS + 1):
        try:
            said = schedule(step)
        except Exception as error:  # any code of the user's may run here
            story = f"{type(error).__name__}: {error}"
            raise ScheduleError(f"the schedule is called with a step, and failed at step {step}: {story}") from error
        found.append(_level(said, step, found[-1] if found else 0.0))
        if found[-1] == 1:
            return tuple(found)
    raise ScheduleError(
        f"the schedule is at {found[-1]:.6g} after {_MOST_STEPS} steps; it ends where it returns 1, the whole cut"
    )


def _level(value: object, step: int, before: float) -> float:
    if callable(value):
        raise ScheduleError(
            "the schedule returned a function: pass schedule.linear(5), with the number of steps, not schedule.linear"
        )
    if not is_finite(value) or not 0 <= value <= 1 + _CLOSE:
        raise ScheduleError(f"the schedule returned {shown(value)} for step {step}; it is a part, from 0 to 1")
    if value < before:
        raise ScheduleError(
            f"the schedule falls from {before} to {value} at step {step}; what is cut does not come back, so it can "
            "only rise"
        )
    return 1.0 if value >= 1 - _CLOSE else float(value)


def course(target: Target | Mapping[str, float], uncut: Graph, parts: Sequence[float]) -> Course:
    """What to aim at on the way from the uncut model to a target.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> way = course(sec.Macs(0.5), graph, [0.5, 1.0])
    >>> way(0.5, graph)
    Macs(0.75)
    >>> way(1.0, sec.trace(sec.apply(net, sec.plan(graph, sec.Macs(0.75))), torch.zeros(1, 4)))
    Macs(0.6666666666666666)
    """
    target = target_of(target)
    if isinstance(target, Ratio):
        return _by_counts(target, uncut)
    if isinstance(target, Budget):
        return _by_cost(target, uncut)
    if isinstance(target, Budgets):
        ways = [_by_cost(part, uncut) for part in target.parts]
        return lambda part, now: Budgets.of(*(way(part, now) for way in ways))
    if tuple(parts) != (1.0,):
        raise ScheduleError(f"{target!r} cannot be approached in {len(parts)} steps; use schedule.one_shot() with it")
    whole = target
    return lambda part, now: whole


def _by_cost(target: Budget, uncut: Graph) -> Course:
    def cost(graph: Graph) -> float:
        return target.cost(PruningProblem(graph, Magnitude(), exact=False, protect=(), round_to=1))({})

    whole = cost(uncut)
    if whole <= 0:
        raise ScheduleError(f"{target!r} is a part of nothing: that is what the model costs on this example")

    def aim(part: float, now: Graph) -> Target:
        share = target.share(whole)
        wanted = whole * (share + (1 - part) * (1 - share))
        return target.at(wanted / cost(now))

    return aim


def _by_counts(target: Ratio, uncut: Graph) -> Course:
    removed = {axis.name: (axis.size, ratio) for axis, ratio in target.by_axis(uncut).items()}

    def aim(part: float, now: Graph) -> Target:
        return _Leave({name: size - int(size * ratio * part + 1e-9) for name, (size, ratio) in removed.items()}, target)

    return aim


@dataclass(frozen=True)
class _Leave:
    """Leave so many positions of each axis, by its name, if a ratio cuts it, and all of an axis that is not named."""

    counts: Mapping[str, int]
    target: Ratio

    def choose(self, problem: PruningProblem) -> Chosen:
        def ratio(axis: Axis) -> float:
            return max(0, axis.size - self.counts.get(axis.name, axis.size)) / axis.size

        cut, instead = self.target.shares(problem)
        counts = problem.counts(
            lambda axis: ratio(axis) if axis in cut else 0, lambda axis: ratio(axis) if axis in instead else 0
        )
        return problem.best(counts)
