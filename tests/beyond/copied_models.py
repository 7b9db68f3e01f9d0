"""Copies of weights that a model keeps beside its registries, and what only other settings and methods use."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from beyond.harness import Case, Do, floats

# copies of weights ----------------------------------------------------------------------------------------------


def net(d: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, d), nn.ReLU(), nn.Linear(d, 2))


class Average(nn.Module):
    """A moving average of each weight in a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.shadow = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    @torch.no_grad()
    def follow(self) -> Any:
        for name, p in self.net.named_parameters():
            self.shadow[name].mul_(0.9).add_(p, alpha=0.1)
        return [each.sum() for each in self.shadow.values()]


class AverageInEval(Average):
    """In eval mode the average answers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.training else functional_call(self.net, self.shadow, (x,))


class Averages:
    """The same as an object of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p


class AverageInAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.averages = Averages(self.net)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def follow(self) -> Any:
        self.averages.update(self.net)
        return [each.sum() for each in self.averages.shadow.values()]


class SlowWeights(nn.Module):
    """Slow weights in a list, masks by the names of layers."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, d), nn.Linear(d, 2)
        self.slow = [p.detach().clone() for p in self.parameters()]
        self.masks = {"a": torch.ones(d, 4), "b": torch.ones(2, d)}

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))

    @torch.no_grad()
    def follow(self) -> None:
        for slow, p in zip(self.slow, self.parameters(), strict=True):
            slow += 0.5 * (p - slow)
            p.copy_(slow)
        for name, mask in self.masks.items():
            getattr(self, name).weight.mul_(mask)


class Elastic(nn.Module):
    """What the weights were, and how much they mattered, in buffers by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        for name, p in self.net.named_parameters():
            self.register_buffer(f"{name.replace('.', '__')}_mean", p.detach().clone())
            self.register_buffer(f"{name.replace('.', '__')}_fisher", torch.ones_like(p))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def follow(self) -> Tensor:
        was = {name: (p, name.replace(".", "__")) for name, p in self.net.named_parameters()}
        terms = (getattr(self, f"{n}_fisher") * (p - getattr(self, f"{n}_mean")).square() for p, n in was.values())
        return sum(term.sum() for term in terms)


def followed(model: nn.Module, x: Tensor) -> Any:
    model = copy.deepcopy(model)
    return model.follow(), model(x)


# what only other settings and methods use -----------------------------------------------------------------------


class Level(nn.Module):
    """A number decides whether the first of its features count twice."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.a, self.b, self.level, self.config = nn.Linear(4, d), nn.Linear(d, 3), 0, {"how": "plainly"}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if self.level > 1:
            h = torch.cat([h[:, :8] * 2, h[:, 8:]], 1)
        return self.b(h)


class InAConfig(Level):
    """A text in a config does."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if self.config["how"] == "twice":
            h = torch.cat([h[:, :8] * 2, h[:, 8:]], 1)
        return self.b(h)


class Fusion(nn.Module):
    """One of three ways to put two layers together, one of which has a layer of its own."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.mode = "add"
        self.a, self.b, self.both, self.out = nn.Linear(4, d), nn.Linear(4, d), nn.Linear(2 * d, d), nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        one, other = torch.relu(self.a(x)), torch.relu(self.b(x))
        if self.mode == "add":
            h = one + other
        elif self.mode == "multiply":
            h = one * other
        else:
            h = self.both(torch.cat([one, other], -1))
        return self.out(h)


def with_other(**attributes: Any) -> Any:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        model = copy.deepcopy(model)
        vars(model).update(attributes)
        return model(x)

    return run


class Tasks(nn.Module):
    """Adapters and heads of several sizes for tasks, of which one is active."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.base = nn.ModuleList([nn.Linear(4, d), nn.Linear(d, d)]).requires_grad_(False)
        self.adapters = nn.ModuleDict({task: nn.Linear(d, d) for task in "ab"})
        deep = nn.Sequential(nn.Linear(d, 6), nn.ReLU(), nn.Linear(6, 3))
        self.heads, self.active = nn.ModuleDict({"a": nn.Linear(d, 2), "b": deep}), "a"

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.base[1](torch.relu(self.base[0](x))))
        return self.heads[self.active](h + self.adapters[self.active](h))


class Statistics(nn.Module):
    """What is known of each class's features, which only `score` compares with."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.features, self.out = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, d)), nn.Linear(d, 3)
        self.register_buffer("means", torch.randn(3, d))
        self.register_buffer("precision", torch.eye(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.features(x)))

    def score(self, x: Tensor) -> Tensor:
        off = self.features(x)[:, None] - self.means
        return torch.einsum("bki,ij,bkj->bk", off, self.precision, off)


class Nearest(Statistics):
    """It is compared with something else, too, so that no run can show what is."""

    def score(self, x: Tensor, weight: Tensor) -> Tensor:
        return ((self.features(x)[:, None] - self.means).square() @ self.precision * weight).sum(-1)


def rows() -> list[Any]:
    return [floats(n, 4, seed=n) for n in (3, 5)]


KINDS = (Average, AverageInEval, AverageInAnObject, SlowWeights, Elastic)
NAMES = ("average in a dict", "average that answers", "average in an object", "slow weights", "elastic weights")
CASES = (
    *(Case(n, k, lambda: [*rows(), Do(followed, floats(2, 4))]) for n, k in zip(NAMES, KINDS, strict=True)),
    Case("a level", Level, lambda: [*rows(), Do(with_other(level=2), floats(2, 4))]),
    Case("a text in a config", InAConfig, lambda: [*rows(), Do(with_other(config={"how": "twice"}), floats(2, 4))]),
    Case("another fusion", Fusion, lambda: [*rows(), Do(with_other(mode="concat"), floats(2, 4))]),
    Case("another task", Tasks, lambda: [*rows(), Do(with_other(active="b"), floats(2, 4))]),
    Case("statistics of classes", Statistics, lambda: [*rows(), Do(lambda m, x: m.score(x), floats(2, 4))]),
    Case(
        "statistics that nobody shows",
        Nearest,
        lambda: [*rows(), Do(lambda m, x: m.score(x, torch.ones(3, 1)), floats(2, 4))],
    ),
)
