"""What sizes, examples and arguments decide out of sight: text, keys, floats, lists, masks, mapped functions."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from beyond.harness import Case, floats, whole

BY_TEXT = {"12": 2.0, "6": 0.5}


def also_written(h: Tensor) -> Tensor:
    half = h * (6.0 / h.shape[-1])
    return half * 0.5


def above_a_float(h: Tensor) -> Tensor:
    return h * 3 if h.shape[-1] > 8.5 else h


def below_a_float(h: Tensor) -> Tensor:
    return h * 3 if 8.5 < h.shape[-1] else h  # noqa: SIM300


def looked_up_as_text(h: Tensor) -> Tensor:
    return h * BY_TEXT.get(str(h.shape[-1]), 1.0)


def by_statistics(h: Tensor) -> Tensor:
    return h * statistics.mean([h.shape[-1], 4])


def by_numpy_root(h: Tensor) -> Tensor:
    return h / np.sqrt(h.shape[-1])


def by_bits(h: Tensor) -> Tensor:
    return h * h.shape[-1].bit_length()


class Between(nn.Module):
    """Two layers, and a function of the user's between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], d: int = 12) -> None:
        super().__init__()
        self.function = function
        self.a, self.b, self.c = nn.Linear(4, d), nn.Linear(d, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.function(torch.relu(self.a(x)))
        return self.c(torch.relu(self.b(h)))


class NamedByWidth(nn.Module):
    """A parameter whose name has the width in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 12), nn.Linear(12, 8), nn.Linear(8, 2)
        self.scale_12 = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.c(torch.relu(self.b(h * getattr(self, f"scale_{h.shape[1]}"))))


class ChosenByWidth(nn.Module):
    """A layer whose number is made of the width."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.choices, self.c = (
            nn.Linear(4, 8),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),
            nn.Linear(8, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.c(torch.relu(self.choices[h.shape[-1] % 3](h)))


class Otherwise(nn.Module):
    """Another layer where the first does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.other, self.c = nn.Linear(4, 12), nn.Linear(12, 8), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        try:
            y = self.b(h)
        except RuntimeError:
            y = self.other(h)
        return self.c(torch.relu(y))


class StepsOfAList(nn.Module):
    """As many steps as there are numbers in a list; the example has one."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.i, self.step, self.o = nn.Linear(4, d), nn.Linear(d, d), nn.Linear(d, 2)

    def forward(self, x: Tensor, scales: list[float]) -> Tensor:
        return self.o(functools.reduce(lambda h, scale: torch.tanh(self.step(h) * scale), scales, self.i(x)))


class PerSample(nn.Module):
    """Layers written for one sample, mapped over a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 12), nn.Linear(12, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(torch.vmap(lambda one: self.b(torch.relu(self.a(one))))(x)))


class Ensemble(nn.Module):
    """Several networks in one, mapped over their weights."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.into, self.out = nn.Parameter(torch.randn(count, 4, 12)), nn.Parameter(torch.randn(count, 12, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda into, out: torch.relu(x @ into) @ out)(self.into, self.out).mean(0)


class Directional(PerSample):
    """The output together with how it changes in a direction."""

    def body(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(nn.functional.elu(self.a(x)))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(self.body, (x,), (torch.ones_like(x),))


class ForceField(nn.Module):
    """Energies, and forces as their gradient by positions."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        soft = nn.Softplus
        self.net = nn.Sequential(nn.Linear(3, d), soft(), nn.Linear(d, 10), soft(), nn.Linear(10, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            positions = positions.detach().requires_grad_(True)
            energy = self.net(positions).squeeze(-1)
            (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=self.training)
        return energy, -slope


def old_critic() -> nn.Module:
    norm = nn.utils.spectral_norm
    return nn.Sequential(norm(nn.Linear(4, 12)), nn.ReLU(), norm(nn.Linear(12, 8)), nn.ReLU(), nn.Linear(8, 2))


def grouped() -> nn.Module:
    return LlamaModel(
        LlamaConfig(
            vocab_size=20, hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=6,
            num_key_value_heads=2, head_dim=4, use_cache=False,
        )
    )  # fmt: skip


def words() -> list[dict[str, Tensor]]:
    """Without a mask, as the example is, and with some of the words hidden."""
    hidden = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    return [
        {"input_ids": whole(20, 2, 4)},
        {"input_ids": whole(20, 2, 5, seed=1), "attention_mask": hidden},
        {"input_ids": whole(20, 1, 3, seed=2)},
    ]


def rows() -> list[Tensor]:
    return [floats(n, 4, seed=n) for n in (3, 5, 1)]


BETWEEN = (also_written, above_a_float, looked_up_as_text, by_statistics, by_numpy_root, by_bits)
ANOTHER_WAY = "takes another way than the full-size one at hidden_models.py"

CASES = (
    *(Case(f.__name__.replace("_", " "), functools.partial(Between, f), rows) for f in BETWEEN),
    Case("below a float", lambda: Between(below_a_float), rows, may_refuse=ANOTHER_WAY),
    Case("named by its width", NamedByWidth, rows),
    Case("chosen by its width", ChosenByWidth, rows, may_refuse=ANOTHER_WAY),
    Case("another layer where one does not fit", Otherwise, rows),
    Case("steps of a list", StepsOfAList, lambda: [(floats(2, 4), [0.5]), (floats(3, 4), [0.5, 0.1, 0.2])]),
    Case("mapped over samples", PerSample, rows),
    Case("mapped over weights", Ensemble, rows),
    Case("forward derivative", Directional, rows),
    Case("forces", ForceField, lambda: [floats(2, 5, 3), floats(1, 7, 3)]),
    Case("spectral norm of the old style", old_critic, rows, exact=False),
    Case("grouped queries, later with a mask", grouped, words, single=True),
)
