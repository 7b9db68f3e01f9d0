"""Models whose code goes another way for reasons that no attribute tells: settings elsewhere, modes of torch, inputs.

As in `asking_models`, each has a layer whose first half is then taken for something else, and one that any way leaves
alone: the first must stay whole, the second is cut.
"""

from __future__ import annotations

import copy
import enum
import functools
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from beyond.asking_models import Asking, holding, rows, turned
from beyond.harness import Case, Do, floats

FLAGS = {"turn": False}
TURNS = False
STACK: list[str] = []
LOG = logging.getLogger(__name__)

# settings that are elsewhere ------------------------------------------------------------------------------------


class OfAModule(Asking):
    """A flag in a dict of the Python module."""

    def mixed(self, h: Tensor) -> Tensor:
        return turned(h) if FLAGS["turn"] else h


class Mixed(Asking):
    """That makes of features what all of them are needed for."""

    def mixed(self, h: Tensor) -> Tensor:
        return h.softmax(1) if FLAGS["turn"] else h


class OfAVariable(Asking):
    """A variable of the Python module, and what follows a return."""

    def mixed(self, h: Tensor) -> Tensor:
        if not TURNS:
            return h
        return h.view(-1, 2, 4).flip(1).flatten(1)


def maybe(h: Tensor) -> Tensor:
    return turned(h) if FLAGS.get("turn") else h


class ByAFunction(Asking):
    """A function asks."""

    def mixed(self, h: Tensor) -> Tensor:
        return maybe(h)


class Stacked(Asking):
    """Contexts that are entered one inside of another."""

    def mixed(self, h: Tensor) -> Tensor:
        if STACK and STACK[-1] == "turn":
            h = h.roll(4, 1)
        return h


class OfTheSystem(Asking):
    """A variable of the environment."""

    def mixed(self, h: Tensor) -> Tensor:
        if os.environ.get("TESTS_OF_SECATEUR_TURN") == "1":
            first, second = h.split(4, 1)
            h = torch.cat([second, first], 1)
        return h


class OfItsClass(Asking):
    """The class, by its name."""

    KIND = "same"

    def mixed(self, h: Tensor) -> Tensor:
        return turned(h) if OfItsClass.KIND == "turned" else h


class WhenLogged(Asking):
    """What is logged has a size that is written there."""

    def mixed(self, h: Tensor) -> Tensor:
        if LOG.isEnabledFor(logging.DEBUG):
            assert h.shape[1] == 8, "eight features"
        return h


# modes of torch -------------------------------------------------------------------------------------------------


class WithGradients(Asking):
    """Where gradients are kept track of."""

    def mixed(self, h: Tensor) -> Tensor:
        return turned(h) if torch.is_grad_enabled() else h


class Noisy(Asking):
    """That, and training."""

    def mixed(self, h: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.training:
            h = h + torch.randn(8, dtype=h.dtype)
        return h


class OfATensor(Asking):
    """Where a tensor has gradients, by checkpoints."""

    def mixed(self, h: Tensor) -> Tensor:
        return checkpoint(turned, h, use_reentrant=False) if h.requires_grad else h


class InInference(Asking):
    """In inference mode."""

    def mixed(self, h: Tensor) -> Tensor:
        return turned(h) if torch.is_inference_mode_enabled() else h


class Cast(Asking):
    """Under autocast."""

    def mixed(self, h: Tensor) -> Tensor:
        return turned(h) if torch.is_autocast_enabled("cpu") else h


class Traced(Asking):
    """While `torch.jit` traces."""

    def mixed(self, h: Tensor) -> Tensor:
        return h.reshape(-1, 2, 4).flip(1).reshape(-1, 8) if torch.jit.is_tracing() else h


# attributes that are asked in other ways ------------------------------------------------------------------------


class Step(enum.Enum):
    """A member says what it means."""

    SAME = "same"
    TURN = "turn"

    @property
    def turns(self) -> bool:
        return self is Step.TURN


class Otherwise(Asking):
    """Attributes that are not there, begin so, have bits, or are members that are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.bits, self.step, self.steps = 1, Step.SAME, ["same"]

    def mixed(self, h: Tensor) -> Tensor:
        if getattr(self, "turn", False):
            h = turned(h)
        if self.kind.startswith("turn") or self.bits & 2:
            h = h.view(-1, 2, 4).flip(1).flatten(1)
        if self.step.turns:
            h = h.roll(4, -1)
        for step in self.steps:
            if step == "turn":
                h = turned(h)
        return h


class Flag:
    """A descriptor."""

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else owner.__dict__.get("_turns", False)

    def __set__(self, owner: Any, value: bool) -> None:
        owner.__dict__["_turns"] = value


def switched(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator asks."""

    @functools.wraps(method)
    def either(self: Any, h: Tensor) -> Tensor:
        h = method(self, h)
        return turned(h) if self.turns else h

    return either


class Described(Asking):
    """What a decorator asks for is behind a descriptor."""

    turns = Flag()

    @switched
    def mixed(self, h: Tensor) -> Tensor:
        return h * 1


class Private(Asking):
    """A private name, and the same method of the class before it."""

    def __init__(self) -> None:
        super().__init__()
        self.__turns = SimpleNamespace(now=False)

    def turn(self, now: bool) -> None:
        self.__turns.now = now

    def mixed(self, h: Tensor) -> Tensor:
        if bool(self.__turns.now):
            h = turned(h)
        return super().mixed(h)


class OfAChild(Asking):
    """An attribute of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()
        self.child.flag = False

    def mixed(self, h: Tensor) -> Tensor:
        return turned(h) if self.child.flag else self.child(h)


class TableOfItsClass(Asking):
    """A table of lambdas on the class."""

    STEPS = {"same": lambda h: h, "turned": lambda h: torch.cat([h[:, 4:], h[:, :4]], 1)}  # noqa: RUF012

    def mixed(self, h: Tensor) -> Tensor:
        return self.STEPS[self.kind](h)


TABLE = {"same": maybe, "turned": turned}


class TableOfAModule(Asking):
    """A table of functions in the Python module."""

    def mixed(self, h: Tensor) -> Tensor:
        return TABLE[self.kind](h)


class Bound(Asking):
    """A method is put into an attribute by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.choose("same")

    def choose(self, kind: str) -> None:
        self.chosen = getattr(self, "_" + kind)

    def _same(self, h: Tensor) -> Tensor:
        return h

    def _turned(self, h: Tensor) -> Tensor:
        return turned(h)

    def mixed(self, h: Tensor) -> Tensor:
        return self.chosen(h)


# inputs ---------------------------------------------------------------------------------------------------------


@dataclass
class Options:
    """What a caller may want."""

    turn: bool = False


class Optional(Asking):
    """Options, or none."""

    def forward(self, x: Tensor, options: Options | None = None) -> Tensor:
        h = torch.relu(self.a(x))
        if options is not None and options.turn:
            h = turned(h)
        return self.out(torch.relu(self.b(h)))


class AnyNumber(Asking):
    """Any number of further tensors."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        for each in more:
            h = turned(h) * each.mean()
        return self.out(torch.relu(self.b(h)))


class WithoutBatch(Asking):
    """A single sample."""

    def mixed(self, h: Tensor) -> Tensor:
        return torch.cat([h[4:], h[:4]]) if h.dim() == 1 else h


class OneOrMany(Asking):
    """One sample, or so many that they are taken in turns."""

    def mixed(self, h: Tensor) -> Tensor:
        if len(h) == 1:
            return turned(h)
        if h.shape[0] > 64:
            return torch.cat([self.mixed(part) for part in h.split(32)]).flip(1)
        return h


class InText(nn.Module):
    """Widths in a text, which a method takes apart that is called as one of texts is."""

    def __init__(self, widths: str = "4-8-6-3") -> None:
        super().__init__()
        self.widths = widths
        sizes = [int(each) for each in widths.split("-")]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)

    def split(self, x: Tensor) -> Tensor:
        half = int(self.widths.split("-")[1]) // 2
        h = torch.relu(self.layers[0](x))
        return self.layers[2](torch.relu(self.layers[1](torch.cat([h[:, half:], h[:, :half]], 1))))


class Compared(nn.Module):
    """Two inputs are compared by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 6)

    def embed(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x))

    def alike(self, one: Tensor, other: Tensor) -> Tensor:
        return (self.embed(one) * self.embed(other).roll(3, 1)).sum(-1)


class Cloned(Asking):
    """Built anew from the arguments that the constructor put into a dict."""

    def __init__(self, d: int = 8, e: int = 6) -> None:
        nn.Module.__init__(self)
        self.given = dict(d=d, e=e)  # noqa: C408
        self.a, self.b, self.out = nn.Linear(4, d), nn.Linear(d, e), nn.Linear(e, 3)

    def clone(self) -> Cloned:
        made = type(self)(**self.given)
        made.load_state_dict(self.state_dict())
        return made


# ----------------------------------------------------------------------------------------------------------------


@contextmanager
def stacked(_model: nn.Module) -> Iterator[None]:
    STACK.append("turn")
    try:
        yield
    finally:
        STACK.pop()


@contextmanager
def with_key(owner: Any, key: str, value: Any, *, before: Any = None) -> Iterator[None]:
    owner[key] = value
    try:
        yield
    finally:
        if before is None:
            del owner[key]
        else:
            owner[key] = before


@contextmanager
def variable(_model: nn.Module) -> Iterator[None]:
    globals()["TURNS"] = True
    try:
        yield
    finally:
        globals()["TURNS"] = False


@contextmanager
def logged(_model: nn.Module) -> Iterator[None]:
    LOG.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        LOG.setLevel(logging.NOTSET)


def under(*contexts: Callable[[nn.Module], AbstractContextManager[Any]]) -> Callable[[], list[Any]]:
    """Inputs of which the last ones meet other settings."""

    def run(model: nn.Module, x: Tensor, context: Callable[[nn.Module], AbstractContextManager[Any]]) -> Tensor:
        with context(model):
            return model(x)

    return lambda: [*rows(), *(Do(run, floats(2, 4), context) for context in contexts)]


def chosen(model: Bound, x: Tensor) -> Tensor:
    model.choose("turned")
    try:
        return model(x)
    finally:
        model.choose("same")


def traced(model: nn.Module, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that newer ways are there
        return torch.jit.trace(model, x, check_trace=False)(x)


def private(model: Private, x: Tensor) -> Tensor:
    model.turn(True)
    try:
        return model(x)
    finally:
        model.turn(False)


def added(model: nn.Module, x: Tensor) -> Tensor:
    other = copy.deepcopy(model)
    other.turn = True
    return other(x)


def in_dict(_model: nn.Module) -> AbstractContextManager[Any]:
    return with_key(FLAGS, "turn", True, before=False)


CASES = (
    Case("a flag in a module's dict", OfAModule, under(in_dict)),
    Case("mixed by a flag", Mixed, under(in_dict)),
    Case("a variable of a module", OfAVariable, under(variable)),
    Case("asked by a function", ByAFunction, under(in_dict)),
    Case("inside of a context", Stacked, under(stacked)),
    Case("asked of the environment", OfTheSystem, under(lambda m: with_key(os.environ, "TESTS_OF_SECATEUR_TURN", "1"))),
    Case("asked of its class", OfItsClass, under(lambda m: holding(OfItsClass, "KIND", "turned"))),
    Case("asked by a log", WhenLogged, under(logged)),
    Case("where gradients are tracked", WithGradients, under(lambda m: torch.enable_grad())),
    Case("where gradients are tracked, in training", Noisy, rows),
    Case("asked of a tensor", OfATensor, under(lambda m: torch.enable_grad())),
    Case("in inference mode", InInference, under(lambda m: torch.inference_mode())),
    Case("under autocast", Cast, under(lambda m: torch.autocast("cpu", torch.bfloat16, cache_enabled=False))),
    Case(
        "while torch.jit traces",
        Traced,
        lambda: [*rows(), Do(traced, floats(2, 4))],
    ),
    Case(
        "asked in four ways",
        Otherwise,
        lambda: [
            *under(
                lambda m: holding(m, "kind", "turned"),
                lambda m: holding(m, "bits", 3),
                lambda m: holding(m, "step", Step.TURN),
                lambda m: holding(m, "steps", ["same", "turn"]),
            )(),
            Do(added, floats(2, 4)),
        ],
    ),
    Case("asked by a decorator", Described, under(lambda m: holding(m, "turns", True))),
    Case("a private name", Private, lambda: [*rows(), Do(private, floats(2, 4))]),
    Case("asked of a child", OfAChild, under(lambda m: holding(m.child, "flag", True))),
    Case("a table of its class", TableOfItsClass, under(lambda m: holding(m, "kind", "turned"))),
    Case("a table of a module", TableOfAModule, under(lambda m: holding(m, "kind", "turned"))),
    Case("a method in an attribute", Bound, lambda: [*rows(), Do(chosen, floats(2, 4))]),
    Case("options or none", Optional, lambda: [*rows(), (floats(2, 4), Options(True))]),
    Case("any number of tensors", AnyNumber, lambda: [*rows(), (floats(2, 4), floats(2, 4, seed=3))]),
    Case("without a batch", WithoutBatch, lambda: [*rows(), floats(4)]),
    Case("one sample, and many", OneOrMany, lambda: [*rows(), floats(1, 4), floats(70, 4)]),
    Case("widths in a text", InText, lambda: [*rows(), Do(lambda m, x: m.split(x), floats(2, 4))]),
    Case("two inputs compared", Compared, lambda: [*rows(), Do(lambda m, a, b: m.alike(a, b), *rows()[:1] * 2)]),
    Case("built anew from a dict", Cloned, lambda: [*rows(), Do(lambda m, x: m.clone()(x), floats(2, 4))]),
)
