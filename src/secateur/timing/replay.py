"""Run one op of a model alone, at any sizes, with its tensors where they would be: weights cold, data warm.

Ops with the same `signature` take the same time; `variables` are what the sizes of an op depend on.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.axes import Atom, Layout, Product, constant, free_atoms, resolve
from secateur.compat import schema
from secateur.ops.record import is_op, part
from secateur.ops.view import moves_nothing
from secateur.tracing.steps import Operand, TimedOp

ShapeOf = Callable[[Operand], list[int]]
LayoutKey = Hashable  # of a layout: equal for the same positions

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


def timed(step: TimedOp) -> bool:
    """Whether a step is worth its own timing: views move no data, and what ops from outside of torch do beside
    computing (sending, waiting) must not be repeated."""
    if not is_op(step.run):
        return True
    return step.run.namespace == "aten" and not moves_nothing(step.run)


def writes(step: TimedOp) -> bool:
    """Whether a step changes what it is given."""
    return is_op(step.run) and schema(step.run).is_mutable


def prepared(step: TimedOp, shape: ShapeOf, arena: Arena) -> Callable[[], Any]:
    """A function that runs a step on tensors of the given shapes."""
    arena.start()
    args = [_made(item, shape, arena) for item in step.args]
    kwargs = {key: _made(item, shape, arena) for key, item in step.kwargs.items()}
    adjust = part(step.run, "resize")
    if adjust is not None:
        whole = {i: [d.size for d in item.dims] for i, item in enumerate(step.args) if isinstance(item, Operand)}
        adjust(args, whole)
    run = step.run
    return lambda: run(*args, **kwargs)


def _made(item: Any, shape: ShapeOf, arena: Arena) -> Any:
    if isinstance(item, Operand):
        return arena.tensor(item, shape(item))
    if isinstance(item, tuple):
        return [_made(part, shape, arena) for part in item]
    return item


def elements(step: TimedOp, shape: ShapeOf) -> int:
    """How many numbers a step is given."""
    return sum(math.prod(shape(operand)) for operand in step.operands())


@dataclass(frozen=True, eq=False)
class Variables:
    """What may change about the sizes of a step: its layouts, where no two of them share an axis; else its axes."""

    step: TimedOp
    layouts: tuple[Layout, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(layout.size for layout in self.layouts)

    def shape(self, sizes: Iterable[int]) -> ShapeOf:
        """The shape of each operand when the variables have these sizes."""
        known = {key(layout): size for layout, size in zip(self.layouts, sizes, strict=True)}
        return lambda operand: [_extent(resolve(dim), known) for dim in operand.dims]


def variables(step: TimedOp) -> Variables:
    """The variables of a step, in order of appearance."""
    found: dict[LayoutKey, Layout] = {}
    for operand in step.operands():
        for dim in map(resolve, operand.dims):
            if not constant(dim) and free_atoms(dim):
                found.setdefault(key(dim), dim)
    atoms = [atom for layout in found.values() for atom in free_atoms(layout)]
    if len(set(atoms)) == len(atoms):
        return Variables(step, tuple(found.values()))
    return Variables(step, tuple(dict.fromkeys(atoms)))


def key(layout: Layout) -> LayoutKey:
    """Equal for layouts of the same parts."""
    if isinstance(layout, Atom):
        return id(layout)
    return (type(layout), *map(key, layout.parts))


def signature(of: Variables) -> Hashable:
    """Equal for steps that take the same time whatever the sizes of their variables."""
    numbers = {key(layout): i for i, layout in enumerate(of.layouts)}

    def text(layout: Layout) -> Hashable:
        number = numbers.get(key(layout))
        if number is not None:
            return (number, layout.size)
        if isinstance(layout, Atom):
            return layout.size
        return (type(layout), *map(text, layout.parts))

    def spelt(item: Any) -> Hashable:
        if isinstance(item, Operand):
            order = tuple(sorted(range(len(item.strides)), key=lambda i: (item.strides[i], -i)))
            spread = tuple(stride == 0 for stride in item.strides)
            dims = tuple(text(resolve(dim)) for dim in item.dims)
            return (dims, order, spread, item.dtype, item.device, item.weight)
        if isinstance(item, tuple):
            return tuple(map(spelt, item))
        return (type(item), repr(item))

    step = of.step
    return (step.run, spelt(step.args), tuple((name, spelt(item)) for name, item in sorted(step.kwargs.items())))


def _extent(layout: Layout, known: Mapping[LayoutKey, int]) -> int:
    size = known.get(key(layout))
    if size is not None:
        return size
    if isinstance(layout, Atom):
        return layout.size
    parts = [_extent(part, known) for part in layout.parts]
    return math.prod(parts) if isinstance(layout, Product) else sum(parts)
