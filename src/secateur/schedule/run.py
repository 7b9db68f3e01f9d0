"""One run of the loop: rounds from the beginning or from a checkpoint, each complete or as if it had not begun."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from secateur.schedule.checkpoint import Checkpoint
from secateur.schedule.course import Course
from secateur.schedule.errors import ScheduleError
from secateur.schedule.moment import Modes, Moment
from secateur.schedule.rounds import Iteration, Round
from secateur.trace import trace, unwrap
from secateur.trace.graph import Graph


@dataclass(frozen=True)
class Functions:
    """The user's own."""

    fit: Callable[..., object]
    evaluate: Callable[[Any], Any]
    cut: Callable[..., object]
    options: Mapping[str, Any]  # for `cut`

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
                return float(value)
        except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several numbers
            pass
        raise ScheduleError(f"evaluate returned a {type(value).__name__}; it returns one number, the higher the better")


class Run:
    """What the rounds share."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        graph: Graph,
        way: Course,
        parts: Sequence[float],
        functions: Functions,
        floor: float | None,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._model = model  # as it was given: what the user's functions get
        self._inner = unwrap(model)
        self._example = example
        self._graph = graph
        self._way = way
        self._parts = parts
        self._functions = functions
        self._checkpoint = checkpoint
        self._found = Iteration((), floor)
        self._modes = Modes(self._inner)
        self._best = Moment(self._inner)

    def finish(self) -> Iteration:
        """Every round that is left; the model ends as the best."""
        if not self._resume():
            self._begin()
        while not self._found.stopped:
            self._round(len(self._found.rounds))
        return self._found

    def _resume(self) -> bool:
        if self._checkpoint is None:
            return False
        with self._whole():
            found = self._checkpoint.resume(self._inner)
            if found is None:
                return False
            if found.best.number:
                self._settle()
                self._graph = trace(self._inner, self._example)
                self._best = Moment(self._inner)
        self._found = found
        return True

    def _begin(self) -> None:
        """Round 0: the uncut model."""
        with self._whole():
            start = time.perf_counter()
            metric = self._functions.metric(self._model)
            self._best.restore()  # measuring changes nothing, so that a resumed run starts from the same
            found = self._with(self._costs(0, 0.0, self._graph, metric, metric, start))
            if not found.met(found.rounds[0]):
                story = f"the uncut model is at {metric:g}, below the floor {found.floor:g}"
                raise ScheduleError(f"{story}; train it first, or lower the floor")
            self._commit(found)
        self._found = found

    def _round(self, number: int) -> None:
        part = self._parts[number - 1]
        with self._whole():
            start = time.perf_counter()
            aim = self._way(part, self._graph)
            self._functions.cut(self._model, self._example, aim, **self._functions.options)
            before = self._functions.metric(self._model)
            self._functions.recover(self._model, number)
            after = self._functions.metric(self._model)
            self._settle()
            graph = trace(self._inner, self._example)
            found = self._with(self._costs(number, part, graph, before, after, start))
            better = Moment(self._inner) if found.best is found.rounds[-1] else None
            self._commit(found)
            if better is None:
                self._best.restore()
        self._found = found
        if better is not None:
            self._best, self._graph = better, graph

    def _settle(self) -> None:
        """Leave nothing of a round that a checkpoint does not hold: modes that `fit` set, gradients."""
        self._modes.restore(self._inner)
        for parameter in self._inner.parameters():
            parameter.grad = None

    def _costs(self, number: int, part: float, graph: Graph, before: float, after: float, start: float) -> Round:
        params = sum(parameter.numel() for parameter in self._inner.parameters())
        return Round(number, part, graph.macs(), params, before, after, time.perf_counter() - start)

    def _with(self, one: Round) -> Iteration:
        return Iteration((*self._found.rounds, one), self._found.floor)

    def _commit(self, found: Iteration) -> None:
        if self._checkpoint is not None:
            self._checkpoint.commit(found, self._inner)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """All or nothing: an interrupt, too, leaves the model at the last complete round."""
        try:
            yield
        except BaseException as error:
            self._best.restore()
            number = len(self._found.rounds) - 1
            error.add_note(f"The model is as of round {number}." if number > 0 else "The model is as it was.")
            raise
