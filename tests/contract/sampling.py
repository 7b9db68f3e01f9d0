"""Samples: arguments on which the rule of an op is tried."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from commutation import SizeOf
from torch import Tensor

from secateur.axes import factor, pieces


class Draw:
    """A source of small random sizes and tensors."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.torch_rng = torch.Generator().manual_seed(seed)

    def n(self, low: int = 2, high: int = 5) -> int:
        return self.rng.randint(low, high)

    def sizes(self, rank: int) -> list[int]:
        return [self.n() for _ in range(rank)]

    def x(self, *shape: int) -> Tensor:
        """Normal numbers: a statistic over them, or a change of their order, shows."""
        return torch.randn(shape, generator=self.torch_rng, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return self.x(*shape).abs() + 0.1

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.torch_rng)

    def bools(self, *shape: int) -> Tensor:
        return self.x(*shape) > 0

    def complex(self, *shape: int) -> Tensor:
        return torch.complex(self.x(*shape), self.x(*shape))


@dataclass(frozen=True)
class Sample:
    """The arguments of one call, and what can be compared about it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    values: bool = True
    run: Callable[..., Any] | None = None


Maker = Callable[[Draw], Sample]
SAMPLES: dict[Any, list[Maker]] = {}


def sample(*ops: Any) -> Callable[[Maker], Maker]:
    """Register a sample for every one of the ops that this torch has, which take the same arguments."""

    def register(maker: Maker) -> Maker:
        for op in filter(None, ops):
            SAMPLES.setdefault(op, []).append(maker)
        return maker

    return register


def call(*args: Any, **kwargs: Any) -> Sample:
    return Sample(args, kwargs)


def shapes_only(*args: Any, **kwargs: Any) -> Sample:
    """For ops that draw numbers or leave memory as it is."""
    return Sample(args, kwargs, values=False)


def out_size(size: int, dim: int, out: int = 0) -> SizeOf:
    """The size of an output's dimension."""
    return SizeOf(size, lambda seen: seen.outputs[out].dims[dim])


def out_sizes(*sizes: int) -> list[SizeOf]:
    """The shape of the first output."""
    return [out_size(size, dim) for dim, size in enumerate(sizes)]


def in_size(size: int, tensor: int, dim: int) -> SizeOf:
    """The size of an input's dimension."""
    return SizeOf(size, lambda seen: seen.inputs[tensor].dims[dim])


def groups_of(size: int) -> SizeOf:
    """A number of groups: channels are (groups × channels of a group)."""
    return SizeOf(size, lambda seen: factor(seen.inputs[0].dims[1], size)[0])


def bound(position: int, tensor: int, dim: int) -> SizeOf:
    """A slice bound: how many positions there are before it."""

    def before(seen: Any) -> Any:
        layout = seen.inputs[tensor].dims[dim]
        return pieces(layout, [position, layout.size - position])[0]

    return SizeOf(position, before)
