"""Further runs that a model is put through by itself, beside the user's example.

One run is one witness: a loop with one step, a branch that only long inputs take, code for training, a table that a
second call finds too short are not seen in it. So the model is called again, with inputs of other sizes, twice in a
row, in training mode, and with other settings; what data decides is decided the other way; branches that no run has
taken are taken by force; modules that no run has reached take the place of others of their kind that were. A call that
the model refuses shows nothing. What no run showed is said.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from secateur.axes import Boundary, atoms, fix
from secateur.tracing.callers import asks_for_dims, further, with_other_dims
from secateur.tracing.capture import OUTPUT, Capture, InputDim, ModelCall, Swaps
from secateur.tracing.examples import (
    Dims,
    arguments,
    resized,
    sizes_to_change,
    tensors_in,
    with_mask,
    with_numbers,
    with_rest,
)
from secateur.tracing.forced import Forced
from secateur.tracing.purity import computes_in
from secateur.tracing.runs import at_odds, join
from secateur.tracing.settings import (
    fewer_arguments,
    keys_asked,
    left_out,
    more_arguments,
    other_arguments,
    other_attributes,
    other_choices,
    other_methods,
)
from secateur.tracing.standins import stand_ins
from secateur.tracing.unreached import alike_beside, idle_modules
from secateur.tracing.untaken import Branching, branching, line_of_branch, untaken, within

_MOST_SWAPS = 4  # runs in which modules that were not reached change places with others
_DATA = "DataDependent"  # how torch says that fake tensors have no values
_MOST_METHODS = 4  # that are called beside forward
_MOST_DECISIONS = 4  # that are tried one at a time
_MOST_FORCED = 6  # runs in which branches are taken that no other has taken


@dataclass(frozen=True)
class Unseen:
    """Something that no run showed, and where in the code it is.

    >>> str(Unseen("training mode: ValueError: expected more than 1 value per channel", "net.py:12"))
    'training mode: ValueError: expected more than 1 value per channel (net.py:12)'
    """

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


@dataclass(frozen=True)
class Refused:
    """Calls that a model failed on: how many it took, and what became of the next one."""

    calls: int
    problem: str
    where: str


Attempt = Callable[..., Capture | Refused]  # (calls, swapped, contrary, real)


class Variants:
    """The further runs of one model; `attempt` carries calls out."""

    def __init__(self, model: nn.Module, capture: Capture, attempt: Attempt) -> None:
        self._model, self._capture, self._attempt = model, capture, attempt
        self.unseen: list[Unseen] = []
        self.both_ways: set[str] = set()  # lines whose decision was seen to come out either way
        self.accepted: list[Any] = []  # the example with other sizes, where the model takes such
        self._beside: list[ModelCall] = []  # methods beside forward that ran
        self.shown: list[Any] = []  # the example with other choices of the caller's

    def add(self, example: Any) -> None:
        """Join what further runs show to what is known from that of an example."""
        idle = {*idle_modules(self._model, self._capture)}
        self._sizes(example)
        self._settings(example)
        self._decisions(example)
        self._branches(example)
        for _ in range(_MOST_SWAPS):
            swapped = list(_swaps(self._model, self._capture, idle))
            if not swapped or not self._joined([ModelCall(example)], swapped):
                break
            self._capture.placed |= {name for name, _ in swapped}

    def _settings(self, example: Any) -> None:
        """Arguments left out, added or otherwise, attributes that code asks, and methods beside forward."""
        for fewer in fewer_arguments(self._model, example):
            self._joined([ModelCall(fewer)])
        self._more(example)
        for more in further(self._model, example):
            self._chosen(ModelCall(more, asked=False), by="a further tensor")
        for name, other in other_arguments(self._model, example):
            if self._chosen(ModelCall(other, asked=False), by=f"{name}={other[name]!r}"):
                self.shown.append(other)
        for key, more in islice(keys_asked(self._model, example), _MOST_DECISIONS):
            if more is None or not self._chosen(ModelCall(more, asked=False), by=f"{key}=True"):
                self.unseen.append(Unseen(f"what forward does when it is given {key}", _place(type(self._model))))
        values = self._capture.values
        idle = [n for n, v in values.items() if v.dims and not v.used and n not in self._capture.places]
        for setting in (*other_attributes(self._model, idle), *islice(other_choices(self._model), _MOST_METHODS)):
            changes = (*setting.values.items(),)
            modes = (False, True) if setting.trained else (False,)
            calls = [ModelCall(example, training=mode, asked=False, attributes=changes) for mode in modes]
            tried = [len(calls) > 1 and self._chosen(*calls)]
            tried = tried if any(tried) else [self._chosen(call) for call in calls]
            if not any(tried) and not setting.guessed:
                self.unseen.append(Unseen(f"what the code does when {setting}", setting.where))
        for number, method in enumerate(other_methods(self._model, idle)):
            calls = [ModelCall(example, asked=False, beside=way) for way in method.ways if number < _MOST_METHODS]
            taken = next(filter(self._chosen, calls), None)
            self._beside += [taken] if taken is not None else []
            if taken is None:
                self.unseen.append(Unseen(f"what {method.name} does, which forward does not call", method.where))

    def _more(self, example: Any) -> None:
        """Arguments that may be left out, and were."""
        variables = stand_ins(self._model, left_out(self._model, example))
        found = self._attempt([ModelCall(example, watched=(*variables.values(),))]) if variables else None
        watched = found.watched if isinstance(found, Capture) else {}
        made = {name: watched[v] for name, v in variables.items() if any(True for _ in tensors_in(watched.get(v)))}
        values, weights = self._capture.values, dict(self._model.named_parameters())
        idle = [weight for name, weight in weights.items() if name in values and not values[name].used]
        for name, tries in more_arguments(self._model, example, made, idle):
            any(self._chosen(ModelCall(more, asked=False, added=name), by=name) for more in tries)

    def _chosen(self, *calls: ModelCall, by: str = "") -> bool:
        """Join calls by another choice, of the caller's if `by` says which; whether they ran.

        What comes of it may be a hidden layer, which is cut as it would be without. What layers put out that only this
        choice reaches is asked for by nobody else, and stays. So does what a caller gets by it in the answer's place.
        """
        found, call = self._attempt(calls), calls[0]
        supposed = call.attributes or call.beside or any(one.branch.own for one in call.forced)
        if isinstance(found, Refused) or (supposed and at_odds(self._capture, found)):
            return False
        new = [v for v in self._capture.values.values() if not v.used]
        join(self._capture, found)
        own = {atom for value in new if value.used for dim in value.dims for atom in atoms(dim)}
        instead = by and len(found.outputs[0]) == len(self._capture.outputs[0])
        for layout in found.unasked:
            if instead or not own.isdisjoint(atoms(layout)):
                fix(layout, Boundary(f"{OUTPUT} with {by}") if by else OUTPUT)
        return True

    def _decisions(self, example: Any) -> None:
        """What data decides is decided the other way: each alone, and all together."""
        lines = [*self._capture.tracer.decisions]
        for contrary in (*([line] for line in lines[:_MOST_DECISIONS]), *([lines] if len(lines) > 1 else [])):
            found = self._attempt([ModelCall(example)], (), contrary)
            if isinstance(found, Capture):
                join(self._capture, found)
                self.both_ways |= found.turned

    def _branches(self, example: Any) -> None:
        """What is left of branches that take tensors apart, in what runs with forward and with methods beside it."""
        every, tried = branching(self._model), list[Forced]()
        left = [one for one, _ran in untaken(every, self._capture.reached)]
        if any(map(asks_for_dims, left)):
            for other in with_other_dims(example):
                self._chosen(ModelCall(other, asked=False), by="other dimensions")
            tried += filter(asks_for_dims, left)
        self._force(ModelCall(example, asked=False), every, tried)
        for call in self._beside:
            own = branching(self._model, call.beside.method) if call.beside is not None else {}
            self._force(call, {function: own[function] for function in own if function not in every}, tried)

    def _force(self, call: ModelCall, every: Branching, tried: list[Forced]) -> None:
        """Take branches that no run has taken: together and, where that fails, each."""
        for _ in range(_MOST_FORCED if every else 0):
            together = list[Forced]()
            for one, _ran in untaken(every, self._capture.reached, tried):
                if not computes_in(self._model, one.function, one.branch.block):
                    tried += within(every, one)
                elif one.fits(together):
                    together.append(one)
            if not together:
                return
            tried += together
            if not self._chosen(replace(call, forced=(*together,))) and len(together) > 1:
                for one in together:
                    self._chosen(replace(call, forced=(one,)))

    def _joined(self, calls: Sequence[ModelCall], swapped: Swaps = (), *, real: bool = False) -> bool:
        found = self._attempt(calls, swapped, real=real)
        if isinstance(found, Capture):
            join(self._capture, found)
        return isinstance(found, Capture)

    def _sizes(self, example: Any) -> None:
        refused, loose = None, with_rest(self._model, with_numbers(self._model, example))
        for dims in sizes_to_change(loose, _tied(self._capture)):
            longer, longest = resized(loose, dims, 1), resized(loose, dims, 2)
            refused = self._in_a_row(example, longer, longest)
            if refused is None:
                self.accepted.append(longer)
                return
        problem = f": {refused.problem}" if refused is not None else ": each is that of a weight"
        self.unseen.append(Unseen("other sizes of its inputs" + problem, refused.where if refused is not None else ""))
        self._in_a_row(example, example, example)

    def _in_a_row(self, example: Any, first: Any, second: Any) -> Refused | None:
        """Two calls and one in training mode, with a mask, on one copy; what it does not take, alone or not at all."""
        masked = with_mask(self._model, second)
        calls = [ModelCall(first), ModelCall(second, again=True), ModelCall(masked, training=True)]
        found = taken = self._following(example, calls)
        if isinstance(found, Refused) and found.calls == 1:
            taken = self._following(example, [calls[0], ModelCall(first)])
            if isinstance(taken, Refused):
                self.unseen.append(Unseen(f"a second call: {found.problem}", found.where))
                taken = self._following(example, calls[:1])
        elif isinstance(found, Refused) and found.calls == 2:
            taken = self._following(example, calls[:2])
        if isinstance(taken, Refused):
            return taken
        join(self._capture, taken)
        if isinstance(found, Refused):
            self._training(example, first, found)
        return None

    def _following(self, example: Any, calls: Sequence[ModelCall]) -> Capture | Refused:
        found = self._attempt(calls)
        return found if isinstance(found, Refused) else _follows(self._capture, found, example, calls[0].example)

    def _training(self, example: Any, other: Any, refused: Refused) -> None:
        """Training mode alone, with real numbers in the end: code for training often asks what was drawn."""
        tries = [(example, True)] if _DATA in refused.problem else [(other, False), (example, False), (example, True)]
        if not any(self._joined([ModelCall(one, training=True)], real=real) for one, real in tries):
            self.unseen.append(Unseen(f"training mode: {refused.problem}", refused.where))


def _follows(known: Capture, found: Capture, example: Any, longer: Any) -> Capture | Refused:
    """A run with a larger batch, if that is what came out of it: code that is written for one batch size may run on."""
    size, now = ((*(t.shape[0] for t in tensors_in(one) if t.ndim), 0)[0] for one in (example, longer))
    for was, became in zip(known.outputs[0], found.outputs[0], strict=False):
        if size != now and was[:1] == (size,) and became[:1] != (now,):
            return Refused(0, "its output does not follow the size of the batch", "")
    return found


def _tied(capture: Capture) -> Dims:
    """The dimensions of inputs that are those of some parameter."""
    values = (value for name, value in capture.values.items() if capture.kinds[name] == "parameter")
    found = (atom.fixed for value in values for dim in value.dims for atom in atoms(dim))
    return frozenset(reason.place for reason in found if isinstance(reason, InputDim))


def _swaps(model: nn.Module, capture: Capture, passed_over: set[str]) -> Iterator[tuple[str, str]]:
    """Modules that no run has reached, each with one of its kind that the example's own run did reach."""
    taken: set[str] = set()
    for name in idle_modules(model, capture):
        beside = next((n for n in alike_beside(model, name) if n not in taken and n not in passed_over), None)
        if beside is not None:
            taken.add(beside)
            yield name, beside


def never_seen(
    model: nn.Module, examples: Sequence[Any], capture: Capture, seen: set[str], told: Collection[str] = ()
) -> Iterator[Unseen]:
    """What the runs that there were did not show; `seen`: lines whose decisions were seen both ways; `told` are some
    of which it is known already."""
    for where in (line for line in capture.tracer.decisions if line not in seen):
        yield Unseen("what other numbers lead to that are read from data", where)
    told = {*capture.tracer.decisions, *told}
    for one, ran in untaken(branching(model), capture.reached):
        shown = not ran or not one.branch.surely or one in capture.taken
        if (where := line_of_branch(one)) not in told and not shown:
            yield Unseen(f"what the code does {one.branch.test}", where)
    for name in idle_modules(model, capture):
        yield Unseen(f"{name}: no run reached it", _place(_code_around(model, name)))
    left = _not_given(model, examples)
    if left:
        yield Unseen(f"what forward does when it is given {', '.join(left)}", _place(type(model)))


def _not_given(model: nn.Module, examples: Sequence[Any]) -> list[str]:
    """Arguments of forward that have a default and were left at it."""
    signature = inspect.signature(model.forward)
    given: set[str] = set()
    for example in examples:
        args, kwargs = arguments(example)
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:  # hooks may change what forward is called with
            return []
        given |= {name for name, value in bound.items() if value is not None}
    named = (p for p in signature.parameters.values() if p.default is not p.empty)
    return [p.name for p in named if p.name not in given]


def _code_around(model: nn.Module, name: str) -> type:
    """The class whose forward would call a module: the nearest around it that is not one of torch's containers."""
    while name:
        name = name.rpartition(".")[0]
        kind = type(model.get_submodule(name))
        if not kind.__module__.startswith("torch."):
            return kind
    return type(model)


def _place(kind: type) -> str:
    """File and line of a module's forward."""
    code = getattr(inspect.unwrap(getattr(kind, "forward", None) or kind), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""
