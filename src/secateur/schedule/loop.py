"""The loop: cut a little, recover, go on; then step back to the best."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from secateur.apply import apply, plan_of
from secateur.importance import Importance
from secateur.plan import plan
from secateur.plan.targets import Target
from secateur.schedule.checkpoint import Checkpoint, Task
from secateur.schedule.course import course
from secateur.schedule.errors import ScheduleError
from secateur.schedule.rounds import Iteration
from secateur.schedule.run import Functions, Run
from secateur.schedule.schedules import Schedule, cubic, levels
from secateur.trace import trace, unwrap


def cut(
    model: nn.Module,
    example: Any,
    target: Target | Mapping[str, float],
    *,
    importance: Importance | None = None,
    exact: bool = False,
    protect: Sequence[str] = (),
    round_to: int = 1,
) -> None:
    """Trace, plan and apply in one: how `iterate` cuts where it is not told otherwise.

    >>> import secateur as sec, torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> cut(net, torch.zeros(1, 4), sec.Ratio(0.5))
    >>> net[0].out_features
    4

    The keywords are those of `secateur.plan`.
    """
    graph = trace(model, example)
    apply(model, plan(graph, target, importance=importance, exact=exact, protect=protect, round_to=round_to))


_by_plan = cut  # `iterate` has a parameter of that name


def iterate(
    model: nn.Module,
    example: Any,
    target: Target | Mapping[str, float],
    *,
    fit: Callable[..., object],
    evaluate: Callable[[Any], Any],
    schedule: Schedule | None = None,
    floor: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    cut: Callable[..., object] = _by_plan,
    **options: Any,
) -> Iteration:
    """Cut a model in rounds, in place, and let it recover after each.

    >>> import secateur as sec, torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> def fit(model): ...  # train it for a while
    >>> def evaluate(model): return 0.9  # measure it
    >>> from secateur.schedule import linear
    >>> found = iterate(net, torch.zeros(1, 4), sec.Macs(0.5), fit=fit, evaluate=evaluate, schedule=linear(2))
    >>> [(r.macs, r.after) for r in found.rounds]
    [(64, 0.9), (48, 0.9), (32, 0.9)]

    Each round cuts, calls `fit(model)` and `evaluate(model)`, whose number is the better the higher. `schedule` says
    how much of the cut each round has done (five rounds of `schedule.cubic` if not told); fractions are those of the
    model as it was given. The rounds end when the whole target is met, or when one leaves the metric below `floor`;
    then the model is left at the best round: the smallest that meets the floor. A `fit(model, step)` gets the
    number of the round there: make the optimizer in `fit`, and seed with `step` what draws from generators of its
    own. What else is given goes to `cut`: for the default the keywords of `secateur.plan`, such as `importance`.

    With `checkpoint`, a folder, each complete round is kept there; the same call in a new process, after whatever
    killed the first, goes on from it and ends with the same model, bit for bit, as far as `fit` draws from the global
    generators or seeds its own. What goes wrong, an interrupt too, leaves the model as of its last complete round.
    """
    functions = _checked(fit, evaluate, cut, options)
    _check_floor(floor)
    parts = levels(cubic(5) if schedule is None else schedule)
    inner = unwrap(model)
    graph = trace(inner, example)
    way = course(target, graph, parts)
    _check_call(functions, model, example, target)
    if cut is _by_plan:
        plan(graph, target, **{**options, "importance": None})  # what cannot be reached is better known now
    kept = None
    if checkpoint is not None:
        _check_uncut(inner)
        kept = Checkpoint(checkpoint, Task.of(inner, graph.macs(), target, parts, floor))
    return Run(model, example, graph, way, parts, functions, floor, kept).finish()


def _checked(fit: Any, evaluate: Any, cut: Any, options: Mapping[str, Any]) -> Functions:
    for name, function in (("fit", fit), ("evaluate", evaluate), ("cut", cut)):
        if not callable(function):
            raise ScheduleError(f"{name} is a function of the model, not {function!r}")
    return Functions(fit, evaluate, cut, options)


def _check_call(functions: Functions, *arguments: Any) -> None:
    try:
        inspect.signature(functions.cut).bind(*arguments, **functions.options)
    except TypeError as error:
        name = getattr(functions.cut, "__name__", "cut")
        raise ScheduleError(f"what iterate does not know goes to {name}: {error}") from None
    except ValueError:  # it does not tell its parameters
        return


def _check_floor(floor: Any) -> None:
    if floor is not None and (
        isinstance(floor, bool) or not isinstance(floor, int | float) or not math.isfinite(floor)
    ):
        raise ScheduleError(f"floor is the lowest metric that will do, a number, not {floor!r}")


def _check_uncut(model: nn.Module) -> None:
    if plan_of(model) is not None:
        raise ScheduleError(
            "the model has been cut already, and a checkpoint is loaded into a model of full size: build it anew, or "
            "go on without checkpoint="
        )
