"""Schedules: plain functions from a step (1, 2, …) to how much of the whole cut is done by then, from 0 to 1."""

from __future__ import annotations

from collections.abc import Callable

from secateur.schedule.errors import ScheduleError

Schedule = Callable[[int], float]

_MOST_STEPS = 1000
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
    _check_steps("linear", steps)
    return lambda step: min(step / steps, 1.0)


def cubic(steps: int) -> Schedule:
    """Fast at first, while there is much that matters little, then slower and slower.

    >>> [cubic(4)(step) for step in (1, 2, 3, 4)]
    [0.578125, 0.875, 0.984375, 1.0]

    The gradual pruning of Zhu and Gupta, "To prune, or not to prune" (2017).
    """
    _check_steps("cubic", steps)
    return lambda step: 1 - (1 - min(step / steps, 1.0)) ** 3


def _check_steps(name: str, steps: object) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= _MOST_STEPS:
        raise ScheduleError(f"{name} takes a number of steps from 1 to {_MOST_STEPS}, not {steps!r}")


def levels(schedule: Schedule) -> tuple[float, ...]:
    """What a schedule says step by step, up to and including the first that is one.

    >>> levels(lambda step: step / 2)
    (0.5, 1.0)
    """
    if not callable(schedule):
        raise ScheduleError(f"a schedule is a function of a step, such as schedule.cubic(5), not {schedule!r}")
    found: list[float] = []
    for step in range(1, _MOST_STEPS + 1):
        found.append(_level(schedule(step), step, found[-1] if found else 0.0))
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 + _CLOSE:
        raise ScheduleError(f"the schedule returned {value!r} for step {step}; it is a part of the cut, from 0 to 1")
    if value < before:
        raise ScheduleError(
            f"the schedule falls from {before} to {value} at step {step}; what is cut does not come back, so it can "
            "only rise"
        )
    return 1.0 if value >= 1 - _CLOSE else float(value)
