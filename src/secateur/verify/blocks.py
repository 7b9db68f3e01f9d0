"""What blocks do with their input, as a run shows: those that add to it, and the model without some of them.

A block puts out its input plus something: x + f(x), perhaps with a norm or an activation behind. So what it takes can
be followed through it by ops that look at single elements, norms and views, and something that was computed from it is
added on the way. Such a block can hand on its input instead, and the model still runs: that is what a model without the
block must put out, which the real removal is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.compat import OpOverload, TorchDispatchMode, is_pointwise, schema
from secateur.errors import VerifyError
from secateur.ops.norm import NORMS
from secateur.ops.pointwise import ADDITIONS, copy, native_dropout, same
from secateur.ops.record import record_of
from secateur.tracing.examples import tensors_in
from secateur.verify.oracle import Expected
from secateur.verify.run import outputs

_ON = NORMS | {same, copy, native_dropout}  # records of ops that hand on all of what they take

Given = tuple[tuple[Any, ...], dict[str, Any]]  # what a module is called with


@dataclass(frozen=True)
class Passing:
    """How a module hands its input on: what it puts out instead, made of what it is given; or why it cannot."""

    instead: Callable[[Given], Any] | None
    why: str = ""


def passing(model: nn.Module, example: Any, names: Collection[str], dtype: torch.dtype) -> dict[str, Passing]:
    """Run a model, and see of some of its modules whether each can hand on its input."""
    found: dict[str, Passing] = {}

    def watching(twin: nn.Module) -> _Followed:
        return _Followed(twin, names, found)

    outputs(model, example, dtype, within=watching)
    return {name: found.get(name, Passing(None, "it does not run on the example")) for name in names}


@contextmanager
def handing_on(model: nn.Module, instead: Mapping[str, Passing]) -> Iterator[None]:
    """Some blocks of a model hand on their input, for as long as the context lasts."""
    modules = dict(model.named_modules())
    before = {name: modules[name].__dict__.get("forward") for name in instead}
    try:
        for name, how in instead.items():
            modules[name].__dict__["forward"] = _forward(how)
        yield
    finally:
        for name, forward in before.items():
            if forward is None:
                modules[name].__dict__.pop("forward", None)
            else:
                modules[name].__dict__["forward"] = forward


def _forward(how: Passing) -> Callable[..., Any]:
    assert how.instead is not None
    instead = how.instead
    return lambda *args, **kwargs: instead((args, kwargs))


def expected_without(model: nn.Module, blocks: Sequence[str], example: Any) -> Expected:
    """What a model must put out without some blocks: the uncut one, in which these hand on their input."""
    error: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        try:
            found = passing(model, example, blocks, dtype)
            for name, how in found.items():
                if how.instead is None:
                    raise VerifyError(f"{name} cannot be removed: {how.why}. The model is as it was")
            return Expected(outputs(model, example, dtype, within=partial(handing_on, instead=found)), [], dtype)
        except VerifyError:
            raise
        except Exception as problem:  # the user's forward, in another precision than it knows
            error = problem
    raise VerifyError(
        f"the full-size model cannot be run for verification ({type(error).__name__}: {error}); "
        "pass verify=False to go without"
    ) from error


# what a module does with what it takes -----------------------------------------------------------------------------


@dataclass
class _Call:
    """One call of a module: what is its input still, if something was added to it, and what is made of it."""

    name: str
    given: Given
    taken: Tensor | None
    shape: torch.Size
    stream: dict[int, bool] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)
    held: list[Tensor] = field(default_factory=list)  # so that ids stay theirs

    def see(self, op: Any, args: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Follow the input through an op."""
        own = [id(tensor) for tensor in args if id(tensor) in self.stream]
        derived = [id(tensor) for tensor in args if id(tensor) in self.made]
        if not own and not derived:
            return
        self.held += out
        joined = any(self.stream[key] for key in own)
        if own and _passes(op):
            joined = joined or (op in ADDITIONS and bool(derived))
            self.stream |= {id(tensor): joined for tensor in out[:1]}
            self.made -= {id(tensor) for tensor in out[:1]}
            out = out[1:]
        self.made |= {id(tensor) for tensor in out}


def _passes(op: Any) -> bool:
    """Whether an op hands on what it takes, element by element, or all of it in another place or scale."""
    if not isinstance(op, OpOverload):
        return False
    views = any(a.alias_info is not None and not a.alias_info.is_write for a in schema(op).returns)
    return is_pointwise(op) or views or record_of(op) in _ON


class _Followed(TorchDispatchMode):
    """A run in which the input of each of some modules is followed through it."""

    def __init__(self, model: nn.Module, names: Collection[str], found: dict[str, Passing]) -> None:
        super().__init__()
        self._open: list[_Call] = []
        self._found = found
        for name, module in model.named_modules():
            if name in names:
                module.register_forward_pre_hook(self._entered(name), with_kwargs=True)
                module.register_forward_hook(self._left, with_kwargs=True)

    def _entered(self, name: str) -> Callable[..., None]:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            taken = _input((args, kwargs))
            call = _Call(name, (args, kwargs), taken, torch.Size() if taken is None else taken.shape)
            if taken is not None:
                call.stream[id(taken)] = False
                call.held.append(taken)
            self._open.append(call)

        return enter

    def _left(self, _module: nn.Module, _args: Any, _kwargs: Any, out: Any) -> None:
        call = self._open.pop()
        again = Passing(None, "it runs more than once")
        self._found[call.name] = again if call.name in self._found else _judged(call, out)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = list(tensors_in((args, kwargs or {}))) if self._open else []
        for call in self._open:
            call.see(func, given, list(tensors_in(out)))
        return out


def _input(given: Given) -> Tensor | None:
    """What a module works on: the first tensor of numbers that it is given."""
    args, kwargs = given
    values = [*args, *([kwargs["hidden_states"]] if "hidden_states" in kwargs else []), *kwargs.values()]
    return next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)


def _judged(call: _Call, out: Any) -> Passing:
    if call.taken is None:
        return Passing(None, "it is given no tensor of numbers")
    entries = out if type(out) in (tuple, list) else (out,)
    first = next((i for i, each in enumerate(entries) if isinstance(each, Tensor)), None)
    if first is None:
        return Passing(None, f"it puts out a {type(out).__name__}")
    made = entries[first]
    if made.shape != call.shape or made.dtype != call.taken.dtype:
        return Passing(None, f"it takes {_form(call.shape)} and puts out {_form(made.shape)}")
    if id(made) not in call.stream:
        return Passing(None, "what it puts out is not what it takes plus something")
    if not call.stream[id(made)]:
        return Passing(None, "it adds nothing to what it takes")
    ways = []
    for i, each in enumerate(entries):
        way = _input if i == first else _handed(call.given, each)
        if way is None:
            return Passing(None, f"it puts out a {type(each).__name__} besides, which others may read")
        ways.append(way)
    if entries is not out:
        return Passing(ways[0])
    kind: Any = type(out)
    return Passing(lambda given: kind(way(given) for way in ways))


def _form(shape: torch.Size) -> str:
    return "x".join(map(str, shape)) or "a number"


def _handed(given: Given, value: Any) -> Callable[[Given], Any] | None:
    """How to say again, from what a module is given, what it puts out beside its tensor; None if it made that."""
    if value is None or isinstance(value, bool | int | float | str):
        return lambda _: value
    args, kwargs = given
    for i, each in enumerate(args):
        if each is value:
            return lambda new: new[0][i]
    for key, each in kwargs.items():
        if each is value:
            return lambda new: new[1][key]
    return None


__all__ = ["Passing", "expected_without", "handing_on", "passing"]
