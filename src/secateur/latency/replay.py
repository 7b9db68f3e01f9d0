"""Run one op of a model alone, at any sizes, with its tensors where they would be: weights cold, data warm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.trace.steps import Operand, Step

Shape = Callable[[Operand], list[int]]

aten = torch.ops.aten
_ALIGNED = 64  # bytes
_LARGEST = 2**28  # bytes of weights that are kept apart; no cache holds as much


class Arena:
    """Memory for operands. Weights follow each other round a ring as large as the model's, so that each is as far from
    the caches as when the whole model runs; everything else starts at the same place each time."""

    def __init__(self, weights: int) -> None:
        self._ring = min(weights, _LARGEST)
        self._memory: dict[Any, Tensor] = {}
        self._next: dict[Any, int] = {}

    def start(self) -> None:
        """Begin a new set of operands."""
        for key in self._next:
            if not key[2]:
                self._next[key] = 0

    def tensor(self, operand: Operand, shape: Sequence[int]) -> Tensor:
        """A tensor of a shape, with an operand's dtype and order of dimensions; floats are ones, integers zeros."""
        strides, needed = _strides(shape, operand.strides)
        key = (operand.dtype, operand.device, operand.weight)
        size = operand.dtype.itemsize
        memory = self._memory.get(key)
        if memory is None or memory.numel() < needed:
            length = max(needed, self._ring // size if operand.weight else 0)
            memory = self._memory[key] = _filled(length, operand)
            self._next[key] = 0
        begin = self._next.get(key, 0)
        if begin + needed > memory.numel():
            if not operand.weight:
                memory = self._memory[key] = _filled(2 * (begin + needed), operand)
            else:
                begin = 0
        self._next[key] = begin + -(-needed * size // _ALIGNED) * _ALIGNED // size
        return memory.as_strided(tuple(shape), strides, begin)

    def refill(self) -> None:
        """Undo what ops wrote."""
        for (dtype, *_), memory in self._memory.items():
            memory.fill_(_fill(dtype))


def _fill(dtype: torch.dtype) -> int:
    return int(dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _filled(length: int, operand: Operand) -> Tensor:
    return torch.full((max(length, 1),), _fill(operand.dtype), dtype=operand.dtype, device=operand.device)


def _strides(shape: Sequence[int], like: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Dense strides in the order of others (0 stays 0), and how many elements they span."""
    strides, span = [0] * len(shape), 1
    order = sorted(range(len(shape)), key=lambda i: (like[i], -i)) if like else list(reversed(range(len(shape))))
    for i in order:
        if not like or like[i] or shape[i] == 1:
            strides[i] = span
            span *= max(shape[i], 1)
    return tuple(strides), span


def _convolution(args: list[Any], whole: Mapping[int, Sequence[int]]) -> None:
    """`groups` follows the channels: as many as the weight leaves of them, or one each in a transposed depthwise."""
    x, weight = args[0].shape, args[1].shape
    if not args[6]:
        args[8] = max(1, x[1] // weight[1])
    elif args[8] == whole[0][1]:
        args[8] = x[1]


def _normalized(args: list[Any], _: Mapping[int, Sequence[int]]) -> None:
    args[1] = list(args[0].shape[-len(args[1]) :])


def _group_norm(args: list[Any], _: Mapping[int, Sequence[int]]) -> None:
    x = args[0].shape
    args[3:6] = [x[0], x[1], math.prod(x[2:])]


# Numbers among an op's arguments that are sizes of its operands.
_SIZES: dict[Any, Callable[[list[Any], Mapping[int, Sequence[int]]], None]] = {
    aten.convolution.default: _convolution,
    aten.native_layer_norm.default: _normalized,
    aten._fused_rms_norm.default: _normalized,
    aten.native_group_norm.default: _group_norm,
}


def timed(step: Step) -> bool:
    """Whether a step is worth its own timing: views move no data, and what ops from outside of torch do beside
    computing (sending, waiting) must not be repeated."""
    if not isinstance(step.run, torch._ops.OpOverload):
        return True
    return step.run.namespace == "aten" and not step.run.is_view and step.run is not aten._unsafe_view.default


def writes(step: Step) -> bool:
    """Whether a step changes what it is given."""
    return isinstance(step.run, torch._ops.OpOverload) and step.run._schema.is_mutable


def prepared(step: Step, shape: Shape, arena: Arena) -> Callable[[], Any]:
    """A function that runs a step on tensors of the given shapes."""
    arena.start()
    args = [_made(item, shape, arena) for item in step.args]
    kwargs = {key: _made(item, shape, arena) for key, item in step.kwargs.items()}
    adjust = _SIZES.get(step.run)
    if adjust is not None:
        whole = {i: [d.size for d in item.dims] for i, item in enumerate(step.args) if isinstance(item, Operand)}
        adjust(args, whole)
    run = step.run
    return lambda: run(*args, **kwargs)


def _made(item: Any, shape: Shape, arena: Arena) -> Any:
    if isinstance(item, Operand):
        return arena.tensor(item, shape(item))
    if isinstance(item, tuple):
        return [_made(part, shape, arena) for part in item]
    return item


def elements(step: Step, shape: Shape) -> int:
    """How many numbers a step is given."""
    return sum(math.prod(shape(operand)) for operand in step.operands())
