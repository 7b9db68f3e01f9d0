"""Methods that a training loop or a user calls beside forward: they follow weights, sample, or take layers apart."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from beyond.harness import Case, Do, floats

# weights that follow others -------------------------------------------------------------------------------------


def net(d: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, d), nn.ReLU(), nn.Linear(d, 2))


class Teacher(nn.Module):
    """A frozen copy that slowly follows, and answers in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = net(), net().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.student if self.training else self.teacher)(x)

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)


class Target(nn.Module):
    """A target network that takes over the weights of another from time to time, and learns for itself besides."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = net(), net()

    def forward(self, x: Tensor) -> Tensor:
        return self.online(x) - self.target(x)

    def follow(self) -> None:
        self.target.load_state_dict(self.online.state_dict())


class Shadow(nn.Module):
    """A moving average of each weight in a buffer, which forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        for name, p in self.net.named_parameters():
            self.register_buffer("mean_" + name.replace(".", "_"), p.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    @torch.no_grad()
    def follow(self) -> Tensor:
        means = [getattr(self, "mean_" + name.replace(".", "_")) for name, _ in self.net.named_parameters()]
        for mean, p in zip(means, self.net.parameters(), strict=True):
            mean.mul_(0.9).add_(p, alpha=0.1)
        return sum((mean - p).square().sum() for mean, p in zip(means, self.net.parameters(), strict=True))


def followed(model: nn.Module, x: Tensor) -> Any:
    model = copy.deepcopy(model)
    return model.follow(), model(x)


# sizes in configs -----------------------------------------------------------------------------------------------


@dataclass
class Config:
    width: int = 12
    code: dict[str, int] = field(default_factory=lambda: {"z": 6})


class Samples(nn.Module):
    """Only `sample` reads the config."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        z = config.code["z"]
        self.a, self.b, self.c = nn.Linear(4, config.width), nn.Linear(config.width, z), nn.Linear(z, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))

    def sample(self, n: int) -> Tensor:
        code = torch.full((n, self.config.code["z"]), 0.5)
        return self.c(torch.relu(code)) + self.c(torch.relu(self.b(torch.full((n, self.config.width), 0.5))))


class OfTheClass(nn.Module):
    """The class holds the width."""

    width = 10

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, self.width), nn.Linear(self.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))

    def sample(self, n: int) -> Tensor:
        return self.b(torch.full((n, self.width), 0.5))


class Renamed(nn.Module):
    """A method that takes something else than forward does computes with the width by another name."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.d = d
        self.a, self.b = nn.Linear(4, d), nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))

    def mixed(self, one: Tensor, other: Tensor) -> Tensor:
        d = self.d
        one, other = self.a(one), self.a(other)
        return self.b(torch.cat([one[:, : d // 2], other[:, d // 2 :]], -1))


# layers taken apart ---------------------------------------------------------------------------------------------


class TakesApart(nn.Module):
    """A method that takes what forward does takes the hidden layer apart by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.a(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(self.hidden(x))))

    def groups(self, x: Tensor) -> Tensor:
        return self.hidden(x).view(-1, 4, 4).mean(1)


class Holds(nn.Module):
    """So does a method of one of its layers, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = TakesApart(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


class OfAList(nn.Module):
    """Layers are made of a list of widths in a loop; only another method reads it."""

    def __init__(self, widths: tuple[int, ...] = (4, 12, 8, 2)) -> None:
        super().__init__()
        self.widths = list(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(self.widths, self.widths[1:], strict=False))

    def forward(self, x: Tensor, first: int | None = None) -> Tensor:
        for layer in self.layers[first:]:
            x = torch.tanh(layer(x))
        return x

    def constant(self, at: int) -> Tensor:
        return self(torch.full((2, self.widths[at]), 0.5), at)


class Keyed(nn.Module):
    """Layers are found by their widths, which are names here and stay."""

    def __init__(self, widths: tuple[int, ...] = (8, 12)) -> None:
        super().__init__()
        self.widths = widths
        self.a, self.b = nn.Linear(4, widths[0]), nn.Linear(widths[1], 2)
        self.layers = nn.ModuleDict({f"{widths[0]} to {widths[1]}": nn.Linear(*widths)})

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.layers[f"{self.widths[0]} to {self.widths[1]}"](self.a(x))))


class Anew(nn.Module):
    """A copy is built anew, from what it was built with."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.given = {"d": d}
        self.a, self.b = nn.Linear(4, d), nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))

    def __deepcopy__(self, memo: Any) -> Anew:
        made = type(self)(**self.given)
        made.load_state_dict(self.state_dict())
        return made


def rows() -> list[Any]:
    return [floats(n, 4, seed=n) for n in (3, 5)]


def sampled() -> list[Any]:
    return [*rows(), Do(lambda m, n: m.sample(n), 2)]


CASES = (
    *(Case(f"{kind.__name__.lower()} that follows", kind, lambda: [*rows(), Do(followed, floats(2, 4))])
      for kind in (Teacher, Target, Shadow)),
    Case("sizes in a config for another method", lambda: Samples(Config()), sampled),
    Case("the width of a class", OfTheClass, sampled, may_refuse="code reads it from the class (method_models.py"),
    Case(
        "the width by another name",
        Renamed,
        lambda: [*rows(), Do(lambda m, x: m.mixed(x, x + 1), floats(2, 4))],
        may_refuse="code that no run reached computes with it (method_models.py",
    ),
    Case("taken apart by another method", TakesApart, lambda: [*rows(), Do(lambda m, x: m.groups(x), floats(2, 4))]),
    Case(
        "taken apart by a layer's method", Holds, lambda: [*rows(), Do(lambda m, x: m.inner.groups(x), floats(2, 4))]
    ),
    Case("widths in a list", OfAList, lambda: [*rows(), Do(lambda m, at: m.constant(at), 1)]),
    Case("widths in names", Keyed, rows),
    Case("copies built anew", Anew, rows, may_refuse="a deep copy of the cut model does not put out"),
)  # fmt: skip
