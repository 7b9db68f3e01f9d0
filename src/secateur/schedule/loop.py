"""The loop: cut a little, recover, go on; then step back to the best.

Each round is complete or as if it had not begun, and may be the first, or the next after a checkpoint.
"""

import inspect
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from secateur.arguments import PATH, Rule, a_function, a_number, check, optional
from secateur.distributed import meet, together
from secateur.errors import ScheduleError
from secateur.importance import Importance
from secateur.pipeline.apply import apply, plan_of
from secateur.planning import plan
from secateur.planning.targets import Target
from secateur.schedule.checkpoint import ScheduleCheckpoint, Task
from secateur.schedule.rounds import Iteration, Round
from secateur.schedule.schedules import Course, Schedule, course, cubic, levels
from secateur.state.transaction import Transaction
from secateur.tracing import trace, unwrap
from secateur.tracing.graph import Graph


def cut(
    model: nn.Module,
    example: Any,
    target: Target | Mapping[str, float],
    *,
    importance: Importance | None = None,
    exact: bool = False,
    protect: Sequence[str] = (),
    round_to: int = 1,
    loadable: bool = False,
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
    made = plan(
        graph, target, importance=importance, exact=exact, protect=protect, round_to=round_to, loadable=loadable
    )
    apply(model, made)


_by_plan = cut  # `iterate` has a parameter of that name
_OWN = ("fit", "evaluate", "cut")  # functions of the user's


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

    In a process group every rank calls this with the bare model, which `fit` wraps anew each time
    (`DistributedDataParallel(model)`). The metric is that of rank 0, which also writes the checkpoint; all resume.
    """
    functions = _Functions(fit, evaluate, cut, options)
    lowest = Rule("the lowest metric that will do, a number", a_number().holds)
    check("iterate", ScheduleError, locals(), floor=optional(lowest), checkpoint=optional(PATH))
    parts = levels(cubic(5) if schedule is None else schedule)
    inner = unwrap(model)
    graph = trace(inner, example)
    way = course(target, graph, parts)
    functions.check_cut(model, example, target)
    if cut is _by_plan:
        plan(graph, target, **{**options, "importance": None})  # what cannot be reached is better known now
    kept = None
    if checkpoint is not None:
        _check_uncut(inner)
        kept = ScheduleCheckpoint(checkpoint, Task.of(inner, graph.macs(), target, parts, floor))
    with together("iterate"):
        return _Iterating(model, example, graph, way, parts, functions, floor, kept).finish()


def _check_uncut(model: nn.Module) -> None:
    if plan_of(model) is not None:
        raise ScheduleError(
            "the model has been cut already, and a checkpoint is loaded into a model of full size: build it anew, or "
            "go on without checkpoint="
        )


@dataclass(frozen=True)
class _Functions:
    """The user's own."""

    fit: Callable[..., object]
    evaluate: Callable[[Any], Any]
    cut: Callable[..., object]
    options: Mapping[str, Any]  # for `cut`

    def __post_init__(self) -> None:
        given, rule = {name: getattr(self, name) for name in _OWN}, a_function("a function of the model")
        check("iterate", ScheduleError, given, **dict.fromkeys(_OWN, rule))

    def check_cut(self, *arguments: Any) -> None:
        """Refuse options that `cut` does not take."""
        try:
            inspect.signature(self.cut).bind(*arguments, **self.options)
        except TypeError as error:
            name = getattr(self.cut, "__name__", "cut")
            raise ScheduleError(f"what iterate does not know goes to cut: {name}: {error}") from None
        except ValueError:  # it does not tell its parameters
            return

    def recover(self, model: nn.Module, step: int) -> None:
        """Call `fit`, with the step if it cannot be called without."""
        try:
            parameter = inspect.signature(self.fit).parameters.get("step")
        except (TypeError, ValueError):  # it does not tell its parameters
            parameter = None
        wanted = parameter is not None and parameter.default is parameter.empty
        self.fit(model, **({"step": step} if wanted else {}))

    def metric(self, model: nn.Module) -> float:
        """What `evaluate` says, as a number."""
        value = self.evaluate(model)
        try:
            if hasattr(value, "__float__"):
                return float(meet("iterate: the metric", repr(float(value)))[0])  # that of rank 0, for all
        except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several numbers
            pass
        raise ScheduleError(f"evaluate returned a {type(value).__name__}; it returns one number, the higher the better")


@dataclass(eq=False)
class _Iterating:
    """What the rounds share."""

    model: nn.Module  # as it was given: what the user's functions get
    example: Any
    graph: Graph  # of the best model so far
    way: Course
    parts: Sequence[float]
    functions: _Functions
    floor: float | None
    checkpoint: ScheduleCheckpoint | None

    def __post_init__(self) -> None:
        self._inner = unwrap(self.model)
        self._found = Iteration((), self.floor)
        self._restore_modes = _modes(self._inner)
        self._best = _moment(self._inner)

    def finish(self) -> Iteration:
        """Every round that is left; the model ends as the best."""
        if not self._resume():
            self._begin()
        while not self._found.stopped:
            self._round(len(self._found.rounds))
        return self._found

    def _resume(self) -> bool:
        if self.checkpoint is None:
            return False
        with self._whole():
            found = self.checkpoint.resume(self._inner)
            if found is None:
                return False
            if found.best.number:
                self._settle()
                self.graph = trace(self._inner, self.example)
                self._best = _moment(self._inner)
        self._found = found
        return True

    def _begin(self) -> None:
        """Round 0: the uncut model."""
        with self._whole():
            start = time.perf_counter()
            metric = self._number(self.functions.metric(self.model), None)
            self._best.roll_back()  # measuring changes nothing, so that a resumed run starts from the same
            found = self._with(0, 0.0, self.graph, metric, metric, start)
            if not found.met(found.rounds[0]):
                story = f"the uncut model is at {metric:g}, below the floor {found.floor:g}"
                raise ScheduleError(f"{story}; train it first, or lower the floor")
            self._commit(found)
        self._found = found

    def _round(self, number: int) -> None:
        part = self.parts[number - 1]
        with self._whole():
            start = time.perf_counter()
            aim = self.way(part, self.graph)
            self.functions.cut(self.model, self.example, aim, **self.functions.options)
            before = self.functions.metric(self.model)
            self.functions.recover(self.model, number)
            after = self._number(self.functions.metric(self.model), self.floor)
            self._settle()
            graph = trace(self._inner, self.example)
            found = self._with(number, part, graph, before, after, start)
            better = _moment(self._inner) if found.best is found.rounds[-1] else None
            self._commit(found)
            if better is None:
                self._best.roll_back()
        self._found = found
        if better is not None:
            self._best, self.graph = better, graph

    @staticmethod
    def _number(metric: float, floor: float | None) -> float:
        """A metric; NaN is below every floor, and without one nothing would stop for it."""
        if floor is None and math.isnan(metric):
            raise ScheduleError("evaluate returned nan, which is no number to go by; is there NaN in the weights?")
        return metric

    def _settle(self) -> None:
        """Leave nothing of a round that a checkpoint does not hold: modes that `fit` set, gradients."""
        self._restore_modes()
        for parameter in self._inner.parameters():
            parameter.grad = None

    def _with(self, number: int, part: float, graph: Graph, before: float, after: float, start: float) -> Iteration:
        """The rounds so far, and this one."""
        params = sum(parameter.numel() for parameter in self._inner.parameters())
        one = Round(number, part, graph.macs(), params, before, after, time.perf_counter() - start)
        return Iteration((*self._found.rounds, one), self.floor)

    def _commit(self, found: Iteration) -> None:
        if self.checkpoint is not None:
            self.checkpoint.commit(found, self._inner)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """All or nothing: an interrupt, too, leaves the model at the last complete round."""
        try:
            yield
        except BaseException as error:
            self._best.roll_back()
            number = len(self._found.rounds) - 1
            error.add_note(f"The model is as of round {number}." if number > 0 else "The model is as it was.")
            raise


def _moment(model: nn.Module) -> Transaction:
    """A model as it is now, values included, to go back to."""
    moment = Transaction(model)
    moment.keep_all()
    return moment


def _modes(model: nn.Module) -> Callable[[], None]:
    """A function that puts back the mode of each module, and which parameters learn, by names: these outlive a cut."""
    training = {name: module.training for name, module in model.named_modules()}
    learning = {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    def restore() -> None:
        for name, module in model.named_modules():
            module.training = training.get(name, module.training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(learning.get(name, parameter.requires_grad))

    return restore
