"""Things that a model shares with others: configs, caches, weights, tensors of the user's, layers that are rebuilt."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from einops.layers.torch import Rearrange, Reduce
from torch import Tensor, nn

from beyond import kept_elsewhere
from beyond.harness import Case, Do, World, floats, whole


@dataclass
class Config:
    hidden: int = 12
    heads: int = 3
    sizes: list[int] = field(default_factory=lambda: [4, 2])


class Configured(nn.Module):
    """Reads its config while it runs."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.into, self.qkv = nn.Linear(config.sizes[0], config.hidden), nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.sizes[1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        b, t, _ = x.shape
        head = self.config.hidden // self.config.heads
        q, k, v = self.qkv(x).view(b, t, 3, self.config.heads, head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, self.config.hidden)
        return self.out(y)


class ConfiguredByDict(nn.Module):
    """The config is a dict; its heads are of a fixed width."""

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        self.config = config
        self.a, self.b = nn.Linear(4, config["width"]), nn.Linear(config["width"], config["width"])
        self.out = nn.Linear(config["width"], 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x)).view(*x.shape[:-1], self.config["width"])
        noise = torch.ones(self.config["width"])
        return self.out(torch.relu(self.b(h * noise)))


def with_teacher(kind: type[nn.Module], config: Any) -> World:
    """A student, and a teacher that has the same config object; both, and the config, are the user's."""
    student, teacher = kind(config), kind(config)
    x = floats(2, 3, 4)
    return World(student, lambda: (teacher.eval()(x), config, kind(config).out.weight.shape))


class Patches(nn.Module):
    """einops: functions, and layers that know their sizes."""

    def __init__(self, d: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Sequential(nn.Conv2d(1, d, 2, 2), Rearrange("b c h w -> b (h w) c"))
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.head = nn.Sequential(Reduce("b t c -> b c", "mean"), nn.Linear(d, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = rearrange(self.qkv(x), "b t (three h c) -> three b h t c", three=3, h=self.heads)
        y = rearrange((q @ k.mT * 0.3).softmax(-1) @ v, "b h t c -> b t (h c)")
        return self.head(x + self.o(y))


class Rearranged(nn.Module):
    """A layer of einops that holds the width it splits off."""

    def __init__(self, d: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, d), nn.Linear(d, 2)
        self.split, self.join = Rearrange("b t (h c) -> b h t c", c=d // heads), Rearrange("b h t c -> b t (h c)")
        self.mix = nn.Linear(d // heads, d // heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.join(torch.relu(self.mix(self.split(torch.relu(self.into(x)))))))


class Remembers(nn.Module):
    """Masks and tables come from caches of another module: a dict, a cached function, an attribute of a class."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.into, self.mix, self.out, self.d = nn.Linear(3, d), nn.Linear(d, 12), nn.Linear(12, 2), d

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        mask = kept_elsewhere.causal(t).to(x)
        h = (mask / mask.sum(-1, keepdim=True)) @ self.into(x) * kept_elsewhere.Rates.of(t).to(x)
        return self.out(torch.relu(self.mix(h + kept_elsewhere.table(t, self.d).to(x).sum(-1, keepdim=True))))


def remembers() -> World:
    """Whatever the caches hold can be used by others."""
    kept_elsewhere.forget()
    held = lambda: (*kept_elsewhere.TABLES.values(), *kept_elsewhere.Rates.made.values())  # noqa: E731
    return World(Remembers(), lambda: {type(tensor).__name__ for tensor in held()} - {"Tensor"})


class TwoWays(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, transposed."""

    def __init__(self, d: int = 6, hidden: int = 12) -> None:
        super().__init__()
        self.w, self.u = nn.Parameter(torch.randn(d, hidden) * 0.3), nn.Parameter(torch.randn(hidden, 8) * 0.3)
        self.b = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = torch.relu(torch.relu(x @ self.w + self.b) @ self.u)
        return torch.relu(code @ self.u.t()) @ self.w.T, code.sum(-1)


class OwnFeatures(nn.Module):
    """The user hands features over once, which the model keeps in a plain attribute and compares with."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 12), nn.Linear(12, d)
        self.texts = torch.zeros(1, d)

    def set_texts(self, texts: Tensor) -> None:
        self.texts = texts

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(torch.relu(self.a(x)))) @ self.texts.t()


TEXTS = whole(9, 3, 10, seed=3) / 4 - 1


def own_features() -> World:
    """The user's tensor stays as it is."""
    model, texts = OwnFeatures(), TEXTS.to(torch.get_default_dtype()).clone()
    model.set_texts(texts)
    return World(model, lambda: texts)


def other_texts(model: nn.Module, x: Tensor, texts: Tensor) -> Tensor:
    model.set_texts(texts)
    return model(x)


class Lookup(nn.Module):
    """A table in a buffer, of positions of the input; an index buffer; a mask."""

    def __init__(self, d: int = 8, longest: int = 9) -> None:
        super().__init__()
        self.register_buffer("place", torch.arange(longest).flip(0))
        self.register_buffer("prior", torch.randn(longest, d))
        self.embed, self.mix, self.out = nn.Embedding(9, d), nn.Linear(d, 12), nn.Linear(12, 2)
        self.shift = nn.Embedding(longest, d)

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.size(1)
        x = self.embed(tokens) + self.prior[:t] + self.shift(self.place[:t])
        return self.out(torch.relu(self.mix(x)))


class Siamese(nn.Module):
    """One encoder for both; a copy of it that only follows, in a list that hides it from the parameters."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, d))
        self.compare = nn.Linear(2 * d, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        u, v = self.encoder(a), self.encoder(b)
        return self.compare(torch.cat([(u - v).abs(), u * v], -1))


def lines(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [floats(*size, seed=i) for i, size in enumerate(sizes)]


CASES = (
    Case("config of a teacher", lambda: with_teacher(Configured, Config()), lambda: lines((2, 3, 4), (1, 5, 4))),
    Case(
        "namespace of a teacher",
        lambda: with_teacher(Configured, SimpleNamespace(hidden=12, heads=2, sizes=(4, 2))),
        lambda: lines((2, 3, 4), (1, 5, 4)),
    ),
    Case("dict of a teacher", lambda: with_teacher(ConfiguredByDict, {"width": 12}), lambda: lines((2, 4), (3, 4))),
    Case("einops", Patches, lambda: lines((2, 1, 4, 4), (1, 1, 6, 4))),
    Case("einops layers that hold a size", Rearranged, lambda: lines((2, 3, 4), (1, 5, 4))),
    Case("caches outside", remembers, lambda: lines((2, 4, 3), (1, 6, 3), (3, 2, 3))),
    Case("one weight used in two ways", TwoWays, lambda: lines((3, 6), (5, 6))),
    Case(
        "features of the user's",
        own_features,
        lambda: [*lines((3, 4), (5, 4)), Do(other_texts, floats(2, 4), floats(6, 10))],
    ),
    Case("tables in buffers", Lookup, lambda: [whole(9, 2, 4), whole(9, 1, 9), whole(9, 3, 1)]),
    Case("siamese", Siamese, lambda: [(floats(n, 4), floats(n, 4, seed=1)) for n in (2, 5)]),
)
