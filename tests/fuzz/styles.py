"""Blocks in coding styles that one run does not show the whole of, (batch, time, features) in and out.

Each style is `style(features, knob) -> (module, features out)`; the knob picks a variant. `Network` joins some between
a stem and a head, with one of many ways to give the answer; what it takes is what a failing example prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from fuzz.image_blocks import pick
from fuzz.style_outputs import ANSWERS
from fuzz.styles_more import RUNS, Style

WIDTHS = (8, 6, 12)
Block = Callable[[int, int], tuple[nn.Module, int]]


class Layer(nn.Module):
    """Layers that can be cut in plain ways, between those that cannot."""

    def __init__(self, d: int, out: int, knob: int) -> None:
        super().__init__()
        self.a, self.b, self.residual = nn.Linear(d, out), nn.Linear(out, d), knob % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return x + self.b(h) if self.residual else h


class Recurrence(nn.Module):
    """A state is made, or learned, and fed back at every step."""

    def __init__(self, d: int, hidden: int, knob: int) -> None:
        super().__init__()
        self.kind, self.hidden = knob % 4, hidden
        self.i, self.r = nn.Linear(d, hidden), nn.Linear(hidden, hidden)
        if self.kind == 1:
            self.start = nn.Parameter(torch.zeros(hidden))
        elif self.kind == 2:
            self.cell = nn.GRUCell(d, hidden)
        elif self.kind == 3:
            self.gate = nn.Linear(d + hidden, hidden)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        if self.kind == 2:
            return self.cell(x, h) + 0.1 * self.r(self.i(x))
        new = torch.tanh(self.i(x) + self.r(h))
        return torch.lerp(h, new, self.gate(torch.cat([x, h], -1)).sigmoid()) if self.kind == 3 else new

    def forward(self, x: Tensor) -> Tensor:
        start = self.start.expand(x.shape[0], -1) if self.kind == 1 else x.new_zeros(x.shape[0], self.hidden)
        out = [start]
        for step in x.unbind(1):
            out.append(self.step(step, out[-1]))
        return torch.stack(out[1:], 1)


class Kept(nn.Module):
    """A state that stays between calls: in an attribute, or in a buffer that is written in place."""

    def __init__(self, d: int, knob: int) -> None:
        super().__init__()
        self.mix, self.last = nn.Linear(d, d), None
        self.register_buffer("memory", torch.zeros(d) if knob % 2 else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is not None:
            y = torch.tanh(x + self.mix(self.memory.clone()))
            with torch.no_grad():
                self.memory.mul_(0.5).add_(y.mean((0, 1)), alpha=0.5)
            return y
        if self.last is None or self.last.shape[0] != x.shape[0]:
            self.last = torch.zeros_like(x[:, 0])
        y = torch.tanh(x + self.mix(self.last).unsqueeze(1))
        self.last = y[:, -1].detach()
        return y


def waves(t: int, d: int) -> Tensor:
    return torch.sin(torch.arange(t)[:, None] * 0.3 + torch.arange(d) * 0.7).to(torch.get_default_dtype())


class Table(nn.Module):
    """A table of positions: kept for the longest input, or made anew for a longer one, of a width that it looks up."""

    def __init__(self, d: int, before: int, own: bool) -> None:
        super().__init__()
        self.d, self.own, self.mix = d, own, nn.Linear(d, d)
        if before == 16:
            self.register_buffer("table", waves(before, d), persistent=False)
        else:
            self.table = waves(before, d)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] < x.shape[1]:
            self.table = waves(x.shape[1], self.d if self.own else x.shape[-1])
        return torch.relu(self.mix(x + self.table[: x.shape[1]]))


NUMBERS: dict[str, Callable[[Tensor], float]] = {
    "float / size": lambda h: 4.0 / h.shape[-1],
    "float * size": lambda h: 0.1 * h.shape[-1],
    "size ** float": lambda h: h.shape[-1] ** -0.5,
    "root": lambda h: 1 / math.sqrt(h.size(-1)),
    "numel": lambda h: h.numel() / h.shape[:-1].numel() / 8.0,
    "len": lambda h: 3.0 / len(h[0, 0]),
    "log": lambda h: math.log(h.shape[2]),
    "float of size": lambda h: float(h.shape[-1]) / 9.0,
    "text": lambda h: int(f"{h.shape[-1]}") / 8,
    "time": lambda h: 2.0 / h.shape[1] + 0.1 * len(h),
}


class Number(nn.Module):
    """A number that a size makes."""

    def __init__(self, d: int, name: str) -> None:
        super().__init__()
        self.name, self.mix = name, nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        return torch.relu(h * NUMBERS[self.name](h))


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "ones": lambda h: torch.ones(h.shape[-1]) + torch.full((h.shape[-1],), 0.5),
    "arange": lambda h: torch.arange(h.shape[-1]).to(h) * 0.1,
    "linspace": lambda h: torch.linspace(0, 1, h.shape[-1]),
    "eye": lambda h: torch.eye(h.shape[-1]).sum(0),
    "one hot": lambda h: F.one_hot(torch.arange(h.shape[-1]), h.shape[-1]).sum(0).to(h),
    "window": lambda h: torch.hann_window(h.shape[-1]).to(h),
    "parity": lambda h: (-1.0) ** torch.arange(h.size(-1)),
}


class Made(nn.Module):
    """A tensor that is made while the model runs, as wide as the features."""

    def __init__(self, d: int, name: str) -> None:
        super().__init__()
        self.name, self.mix = name, nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        return torch.relu(h * MADE[self.name](h))


class OnSize(nn.Module):
    """Long inputs take another way; or so it is for wide features."""

    def __init__(self, d: int, knob: int) -> None:
        super().__init__()
        self.wide = knob % 2 == 1
        self.short, self.long = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        big = x.shape[-1] > 5 if self.wide else x.shape[1] > 4
        return torch.relu(self.long(x) if big else self.short(x))


class OnTraining(nn.Module):
    """Code that only training runs."""

    def __init__(self, d: int, kind: str) -> None:
        super().__init__()
        self.kind, self.mix, self.width = kind, nn.Linear(d, 8), 8
        self.side = nn.Linear(8, 3) if kind == "head" else None
        self.register_buffer("average", torch.zeros(8) if kind == "average" else None)
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mix(x))
        if not self.training:
            return h
        if self.kind == "noise of a number":
            return h + 0.1 * torch.randn(h.shape[0], 1, 8)
        if self.kind == "noise of a width":
            return h + 0.1 * torch.randn(h.shape[0], 1, self.width)
        if self.side is not None:
            self.loss = self.side(h).mean().detach()
        if self.average is None:
            return F.dropout(h + 0.1 * torch.randn_like(h), 0.2)
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * h.mean((0, 1)))
        return h - self.average


class OnData(nn.Module):
    """One way or the other, by what is in the input."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.a(x) if bool(x[0, 0, 0] > 0) else self.b(x))


class Experts(nn.Module):
    """Each token goes to the best of some experts."""

    def __init__(self, d: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(d, count)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 6), nn.ReLU(), nn.Linear(6, d)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chosen = self.router(flat).argmax(-1)
        out = flat.clone()
        for i, expert in enumerate(self.experts):
            here = torch.where(chosen == i)[0]
            if len(here):
                out[here] = out[here] + expert(flat[here])
        return out.view(x.shape)


CONFIGS: dict[int, SimpleNamespace] = {}  # one for each width: blocks and networks share them


class Configured(nn.Module):
    """Reads a config that others read, too."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.config, self.q, self.v = (
            CONFIGS.setdefault(d, SimpleNamespace(heads=2, width=d)),
            nn.Linear(d, d),
            nn.Linear(d, d),
        )

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.config.heads, self.config.width // self.config.heads)
        q, v = (f(x).view(shape).transpose(1, 2) for f in (self.q, self.v))
        return F.scaled_dot_product_attention(q, q, v).transpose(1, 2).flatten(2)


class Heads(nn.Module):
    """Layers of einops that hold sizes."""

    def __init__(self, d: int, knob: int) -> None:
        super().__init__()
        split = {"h": 2} if knob % 2 else {"c": d // 2}
        self.split, self.join = Rearrange("b t (h c) -> b t h c", **split), Rearrange("b t h c -> b t (h c)")
        self.mix = nn.Linear(d // 2, d // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(torch.relu(self.mix(self.split(x))))


class Repeated(nn.Module):
    """One layer, as often as the input is long; at times its weight, transposed."""

    def __init__(self, d: int, knob: int) -> None:
        super().__init__()
        self.mix, self.turned = nn.Linear(d, d), knob % 2 == 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + (x.shape[1] - 1) % 3):
            x = torch.tanh(self.mix(x))
        return x @ self.mix.weight if self.turned else x


class Held(nn.Module):
    """A tensor in a plain attribute."""

    def __init__(self, d: int, knob: int) -> None:
        super().__init__()
        gain = torch.linspace(0.5, 1.5, d)
        self.gains, self.mix = (gain if knob % 2 else [gain, {"shift": gain / 2}]), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.gains, Tensor):
            return torch.relu(self.mix(x) * self.gains)
        return torch.relu(self.mix(x) * self.gains[0] + self.gains[1]["shift"])


TRAINED = ("noise of a number", "noise of a width", "noise alike", "head", "average")


def _trained(kind: str) -> Block:
    return lambda d, knob: (OnTraining(d, kind), 8)


def _with(kind: Callable[..., nn.Module], *fixed: Any) -> Block:
    return lambda d, knob: (kind(d, *(fixed or (knob,))), d)


STYLES: dict[str, Block] = {
    "layer": lambda d, knob: ((Layer(d, out := pick(WIDTHS, knob // 2), knob)), d if knob % 2 == 0 else out),
    "recurrence": lambda d, knob: (Recurrence(d, out := pick(WIDTHS, knob // 4), knob), out),
    "state kept": lambda d, knob: (Kept(d, 0), d),
    "state in a buffer": lambda d, knob: (Kept(d, 1), d),
    "table kept": _with(Table, 16, True),
    "table grown": _with(Table, 0, True),
    "table grown as wide as its input": _with(Table, 0, False),
    "table made before and grown": _with(Table, 2, True),
    "table made before, grown as wide as its input": _with(Table, 2, False),
    **{f"number: {name}": _with(Number, name) for name in NUMBERS},
    **{f"made: {name}": _with(Made, name) for name in MADE},
    "branch on length": _with(OnSize, 0),
    "branch on width": _with(OnSize, 1),
    **{f"training: {kind}": _trained(kind) for kind in TRAINED},
    "branch on data": lambda d, knob: (OnData(d), d),
    "experts": lambda d, knob: (Experts(d, 2 + knob % 2), d),
    "einops": _with(Heads),
    "repeated": _with(Repeated),
    "held tensors": _with(Held),
    "config": lambda d, knob: (Configured(d), d),
    **{name: _with(Style, name) for name in RUNS},
}


class Network(nn.Module):
    """A stem, blocks, a head, and a way to answer."""

    def __init__(self, blocks: list[tuple[str, int]], answer: str) -> None:
        super().__init__()
        width = pick(WIDTHS, len(blocks))
        self.stem, self.body, self.answer = nn.Linear(3, width), nn.ModuleList(), answer
        for style, knob in blocks:
            block, width = STYLES[style](width, knob)
            self.body.append(block)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Any:
        h = self.stem(x)
        for block in self.body:
            h = block(h)
        return ANSWERS[self.answer](self.head(h), h)
