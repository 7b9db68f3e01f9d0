"""Models whose settings are asked in many ways: behind names, properties, configs, tables of methods, keys of inputs.

Each has a layer whose first half is taken for something else with another setting, and beside it one that any way
leaves alone: the first must stay whole, the second is cut.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from beyond.harness import Case, Do, floats


class Mode(enum.Enum):
    """What is done with features."""

    SUM = 0
    TURN = 1


def turned(h: Tensor) -> Tensor:
    return torch.cat([h[:, 4:], h[:, :4]], 1)


class Asking(nn.Module):
    """`mixed` is what the others do otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        self.flag, self.kind, self.number, self.mode = False, "same", 0, Mode.SUM
        self.limit: int | None = None
        self.config, self.steps = SimpleNamespace(turn=False), list[str]()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.b(self.mixed(torch.relu(self.a(x))))))

    def mixed(self, h: Tensor) -> Tensor:
        return h


class Returns(Asking):
    """What follows a return is decided by it."""

    def mixed(self, h: Tensor) -> Tensor:
        if not self.flag:
            return h
        return torch.cat([h[:, 4:], h[:, :4]], 1)


class OtherName(Asking):
    """A variable is another name of an attribute."""

    def mixed(self, h: Tensor) -> Tensor:
        kind = self.kind
        if kind == "turned":
            h = torch.cat([h[:, 4:], h[:, :4]], 1)
        return h


class InConfig(Asking):
    """A variable is another name of a config."""

    def mixed(self, h: Tensor) -> Tensor:
        config = self.config
        return torch.cat([h[:, 4:], h[:, :4]], 1) if config.turn else h


class Matches(Asking):
    """A match, whose last case raises."""

    def mixed(self, h: Tensor) -> Tensor:
        match self.kind:
            case "same":
                return h
            case "turned":
                return torch.cat([h[:, 4:], h[:, :4]], 1)
            case _:
                raise ValueError(self.kind)


class Helped(Asking):
    """A function takes the features apart."""

    def mixed(self, h: Tensor) -> Tensor:
        return turned(h) if self.flag else h


class Behind(Asking):
    """The attribute is behind a property."""

    @property
    def turns(self) -> bool:
        return self.flag

    def mixed(self, h: Tensor) -> Tensor:
        return turned(h) if self.turns else h


class Often(Asking):
    """So many times."""

    def mixed(self, h: Tensor) -> Tensor:
        for _ in range(self.number):
            h = turned(h)
        return h


class Window(Asking):
    """A number of which only is asked whether it is one."""

    def mixed(self, h: Tensor) -> Tensor:
        return turned(h) if self.number else h


class Listed(Asking):
    """Steps by their names."""

    def mixed(self, h: Tensor) -> Tensor:
        return turned(h) if "turn" in self.steps else h


class OfAnEnum(Asking):
    """A member of an enumeration."""

    def mixed(self, h: Tensor) -> Tensor:
        return turned(h) if self.mode is Mode.TURN else h


class Limited(Asking):
    """A number that may be None, and what it is used for has a size that is written there."""

    def mixed(self, h: Tensor) -> Tensor:
        if self.limit is not None:
            mask = torch.zeros(8, dtype=h.dtype)
            mask[: self.limit] = 1
            h = h * mask
        return h


class Table(Asking):
    """A method out of a table."""

    def mixed(self, h: Tensor) -> Tensor:
        return {"same": self.same, "turned": self.turned}[self.kind](h)

    def same(self, h: Tensor) -> Tensor:
        return h

    def turned(self, h: Tensor) -> Tensor:
        return torch.cat([h[:, 4:], h[:, :4]], 1)


class ByName(Asking):
    """A method by its name."""

    def mixed(self, h: Tensor) -> Tensor:
        return getattr(self, "mix_" + self.kind)(h)

    def mix_same(self, h: Tensor) -> Tensor:
        return h

    def mix_turned(self, h: Tensor) -> Tensor:
        return torch.roll(h, 4, -1)


class InTraining(Asking):
    """Only in training mode, and a tensor is made of a size that is written there."""

    def mixed(self, h: Tensor) -> Tensor:
        if self.training and self.flag:
            h = h + torch.randn(8, dtype=h.dtype)
        return h


class Further(Asking):
    """Further arguments."""

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        h = torch.relu(self.a(x))
        return self.out(torch.relu(self.b(turned(h) if more.get("turn", False) else h)))


class Batch(Asking):
    """A dict of inputs."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        h = torch.relu(self.a(batch["x"]))
        if batch.get("turn"):
            h = turned(h)
        return self.out(torch.relu(self.b(h)))


class Words(Asking):
    """Words that only the annotation tells."""

    def forward(self, x: Tensor, how: Literal["same", "turned"] = "same") -> Tensor:
        h = torch.relu(self.a(x))
        return self.out(torch.relu(self.b(turned(h) if how != "same" else h)))


class Step:
    """Something that is no module, and called."""

    def __init__(self) -> None:
        self.turns = False

    def __call__(self, h: Tensor) -> Tensor:
        return turned(h) if self.turns else h


class Holds(Asking):
    """An object that the model holds is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def mixed(self, h: Tensor) -> Tensor:
        return self.step(h)


class Both(Asking):
    """Two attributes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.other = False

    def mixed(self, h: Tensor) -> Tensor:
        return turned(h) if self.flag and self.other else h


class InTurn(Asking):
    """Another method goes through layers, and adds what it has by halves."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.b(torch.relu(self.a(x)) * self.beside(x))))

    def halves(self, x: Tensor) -> Tensor:
        a, b = (layer(x).view(len(x), 2, -1) for layer in (self.a, self.beside))
        return self.out(torch.relu(self.b((a.flip(1) * b).flatten(1))))


class Autoencoder(Asking):
    """Other methods: what they take is not called as it is in forward, or comes out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.back = nn.Linear(6, 3), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.code(torch.relu(self.b(torch.relu(self.a(x)))))
        return self.out(torch.relu(self.b(torch.relu(self.back(code))))), code

    def embed(self, images: Tensor) -> Tensor:
        return self.a(images)[:, :4]

    def turned(self, code: Tensor) -> Tensor:
        return self.out(torch.relu(self.b(turned(torch.relu(self.back(code))))))


@contextmanager
def holding(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def both(model: nn.Module, x: Tensor) -> Tensor:
    with holding(model, "flag", True), holding(model, "other", True):
        return model(x)


def with_(name: str, value: Any, training: bool = False) -> Callable[[], list[Any]]:
    """Inputs of which the last meets another setting."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        owner = {"turn": model.config, "turns": getattr(model, "step", None)}.get(name, model)
        with holding(owner, name, value), holding(model, "training", training):
            return model(x)

    return lambda: [*rows(), Do(run, floats(2, 4))]


def rows() -> list[Any]:
    return [floats(n, 4, seed=n) for n in (3, 5)]


CASES = (
    Case("asked before a return", Returns, with_("flag", True)),
    Case("asked by another name", OtherName, with_("kind", "turned")),
    Case("asked of a config by another name", InConfig, with_("turn", True)),
    Case("asked by a match", Matches, with_("kind", "turned")),
    Case("asked before a function", Helped, with_("flag", True)),
    Case("asked by a property", Behind, with_("flag", True)),
    Case("asked how often", Often, with_("number", 1)),
    Case("asked whether there is a number", Window, with_("number", 2)),
    Case("asked what is in a list", Listed, with_("steps", ["turn"])),
    Case("asked for a member", OfAnEnum, with_("mode", Mode.TURN)),
    Case("asked for a number or none", Limited, with_("limit", 3)),
    Case("chosen out of a table", Table, with_("kind", "turned")),
    Case("chosen by its name", ByName, with_("kind", "turned")),
    Case("asked in training", InTraining, with_("flag", True, training=True)),
    Case("asked of further arguments", Further, lambda: [*rows(), {"x": floats(2, 4), "turn": True}]),
    Case("asked of a dict", Batch, lambda: [({"x": x},) for x in rows()] + [({"x": floats(2, 4), "turn": True},)]),
    Case("asked of an object", Holds, with_("turns", True)),
    Case("asked of two at once", Both, lambda: [*rows(), Do(both, floats(2, 4))]),
    Case("layers in turn", InTurn, lambda: [*rows(), Do(lambda m, x: m.halves(x), floats(2, 4))]),
    Case("words in an annotation", Words, lambda: [*rows(), (floats(2, 4), "turned")]),
    Case("taken apart for others", Autoencoder, lambda: [*rows(), Do(lambda m, x: m.embed(x), floats(2, 4))]),
    Case("what comes out taken apart", Autoencoder, lambda: [*rows(), Do(lambda m, z: m.turned(z), floats(2, 3))]),
)
