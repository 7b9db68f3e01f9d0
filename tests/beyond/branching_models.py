"""What one run does not show: experts, branches on data, on sizes and on training, loops of any length, exits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beyond.harness import Case, Do, floats


class Experts(nn.Module):
    """The best expert for each token; some are not reached by the example."""

    def __init__(self, d: int = 8, count: int = 4, inner: int = 12) -> None:
        super().__init__()
        self.into = nn.Linear(3, d)
        self.router = nn.Linear(d, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, inner), nn.ReLU(), nn.Linear(inner, d)) for _ in range(count)
        )
        self.head = nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x).flatten(0, 1)
        weight, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            here = (chosen == i).nonzero(as_tuple=True)[0]
            if here.numel():
                y[here] = expert(x[here]) * weight[here, None]
        return self.head(x + y)


class TopTwo(nn.Module):
    """The two best experts, gathered with index_add; every expert runs, on no token at times."""

    def __init__(self, d: int = 8, count: int = 3) -> None:
        super().__init__()
        self.into, self.gate, self.head = nn.Linear(4, d), nn.Linear(d, count, bias=False), nn.Linear(d, 2)
        self.up = nn.ModuleList(nn.Linear(d, 10) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(10, d) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        odds, chosen = torch.topk(self.gate(h).softmax(-1), 2)
        out = torch.zeros_like(h)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, slot = torch.where(chosen == i)
            out.index_add_(0, token, down(F.silu(up(h[token]))) * odds[token, slot, None])
        return self.head(h + out)


class BranchOnData(nn.Module):
    """One of two ways, by the sign of a mean: the example takes the first."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.a, self.bright, self.dark, self.out = nn.Linear(4, d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        h = self.bright(h) if x.mean() > 0 else self.dark(h)
        return self.out(torch.relu(h))


class BranchOnSize(nn.Module):
    """Long sequences are pooled first, by a layer that short ones never see."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.embed, self.pool = nn.Linear(3, d), nn.Conv1d(d, d, 2, stride=2)
        self.mix, self.out = nn.Linear(d, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if x.shape[1] > 8:
            h = self.pool(h.transpose(1, 2)).transpose(1, 2)
        return self.out(F.relu(self.mix(h))).mean(1)


class NoiseInTraining(nn.Module):
    """Noise whose width is written as a number, only while training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 12), nn.Linear(12, 10), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if self.training:
            h = h + 0.1 * torch.randn(x.shape[0], 12)
        return self.out(torch.relu(self.b(h)))


class MovingAverage(nn.Module):
    """Buffers of a moving average, made and used only while training."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(4, d), nn.Linear(d, 2)
        self.register_buffer("center", torch.zeros(1, d))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.training:
            with torch.no_grad():
                self.center.copy_(self.center * 0.9 + h.mean(0, keepdim=True) * 0.1)
            h = h - self.center
        return self.out(h)


class Auxiliary(nn.Module):
    """A second head while training; dropout; whole branches dropped at random."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, d, 3, padding=1), nn.Conv2d(d, d, 1), nn.Conv2d(d, d, 3, padding=1)
        self.drop = nn.Dropout2d(0.3)
        self.auxiliary = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(d, 6), nn.ReLU(), nn.Linear(6, 4)
        )
        self.head = nn.Linear(d, 4)
        self.rate = 0.2

    def drop_path(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask / keep

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = F.relu(self.stem(x))
        side = self.auxiliary(x) if self.training else None
        x = x + self.drop_path(self.b(self.drop(F.relu(self.a(x)))))
        y = self.head(x.mean((2, 3)))
        return y if side is None else (y, side)


class EarlyExit(nn.Module):
    """Leaves as soon as it is sure, which depends on the data."""

    def __init__(self, d: int = 10, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, d)
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(depth))
        self.exits = nn.ModuleList(nn.Linear(d, 3) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = x + torch.relu(block(x))
            y = leave(x)
            if y.softmax(-1).max() > 0.9:
                break
        return y


class Recursive(nn.Module):
    """One block, as often as asked; with one step its two ends need not match."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.into, self.block, self.out = nn.Linear(4, d), nn.Linear(d, d), nn.Linear(d, 2)

    def go(self, x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else self.go(torch.relu(self.block(x)), depth - 1)

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        return self.out(self.go(self.into(x), depth))


class Optional(nn.Module):
    """Arguments that may be left out: a condition, a skip, a list of further features."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.a, self.condition, self.more, self.b = nn.Linear(4, d), nn.Linear(3, d), nn.Linear(2, d), nn.Linear(d, 12)
        self.out = nn.Linear(12, 2)

    def forward(self, x: Tensor, condition: Tensor | None = None, more: list[Tensor] | None = None) -> Tensor:
        h = self.a(x)
        if condition is not None:
            h = h * self.condition(condition).sigmoid()
        for extra in more or []:
            h = h + self.more(extra)
        return self.out(F.relu(self.b(F.relu(h))))


class LastLayers(nn.Module):
    """Stops where it is told to; layers behind that are not run on the example."""

    def __init__(self, d: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(3, d)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(d, 12), "down": nn.Linear(12, d)}) for _ in range(depth)
        )
        self.norm, self.head, self.depth = nn.LayerNorm(d), nn.Linear(d, 2), 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers[: self.depth]:
            h = h + layer["down"](F.gelu(layer["up"](h)))
        return self.head(self.norm(h))


class MoreLayers(nn.Module):
    """As many layers as it is told; with one, what feeds the second is not what feeds the first."""

    def __init__(self, d: int = 10, depth: int = 3) -> None:
        super().__init__()
        self.into, self.layers = nn.Linear(3, d), nn.ModuleList(nn.Linear(d, d) for _ in range(depth))
        self.head, self.depth = nn.Linear(d, 2), 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for layer in self.layers[: self.depth]:
            h = torch.relu(layer(h))
        return self.head(h)


class Switched(nn.Module):
    """A layer that comes behind another of its kind, once it is switched on."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.a, self.b, self.extra, self.out = nn.Linear(3, d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, 2)
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.b(torch.relu(self.a(x))))
        return self.out(h + torch.relu(self.extra(h)) if self.on else h)


def switched(model: nn.Module, x: Tensor) -> Tensor:
    model.on = True
    return model(x)


def deeper(model: nn.Module, x: Tensor) -> Tensor:
    model.depth = 3
    return model(x)


def rows(*sizes: tuple[int, ...], shift: float = 0.0) -> list[Tensor]:
    return [floats(*size, seed=i) + shift for i, size in enumerate(sizes)]


CASES = (
    Case(
        "experts that are not reached",
        Experts,
        lambda: [floats(1, 1, 3), *rows((4, 6, 3), (2, 9, 3)), -floats(3, 3, 3)],
    ),
    Case("top two experts", TopTwo, lambda: [floats(2, 4), *rows((9, 4), (16, 4))]),
    Case("branch on data", BranchOnData, lambda: [floats(3, 4) + 2, floats(2, 4) - 2, floats(5, 4)]),
    Case("branch on a size", BranchOnSize, lambda: rows((2, 5, 3), (2, 12, 3), (1, 9, 3), (3, 8, 3))),
    Case("noise while training", NoiseInTraining, lambda: rows((3, 4), (5, 4))),
    Case("moving average while training", MovingAverage, lambda: rows((3, 4), (5, 4))),
    Case("auxiliary head, drop path", Auxiliary, lambda: rows((2, 3, 5, 5), (3, 3, 7, 6))),
    Case("early exit", EarlyExit, lambda: [40 * floats(1, 4), 0.01 * floats(1, 4), *rows((3, 4))]),
    Case(
        "one block, many times",
        Recursive,
        lambda: [floats(2, 4), (floats(3, 4), 3), Do(lambda m, x: m(x, depth=2), floats(1, 4))],
    ),
    Case(
        "optional arguments",
        Optional,
        lambda: [
            floats(2, 4),
            (floats(3, 4), floats(3, 3)),
            {"x": floats(1, 4), "more": [floats(1, 2), floats(1, 2, seed=1)]},
        ],
    ),
    Case("more layers than the example runs", MoreLayers, lambda: [floats(2, 3), Do(deeper, floats(3, 3))]),
    Case("a layer switched on later", Switched, lambda: [floats(2, 3), Do(switched, floats(3, 3))]),
    Case("layers not run on the example", LastLayers, lambda: [floats(2, 3), Do(deeper, floats(3, 3))]),
)
