"""Which ops of a model are the same, and what their sizes depend on."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from secateur.axes import Atom, Layout, Product, constant, free_atoms, resolve
from secateur.trace.steps import Operand, Step

Key = Hashable  # of a layout: equal for the same positions


@dataclass(frozen=True, eq=False)
class Variables:
    """What may change about the sizes of a step: its layouts, where no two of them share an axis; else its axes."""

    layouts: tuple[Layout, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(layout.size for layout in self.layouts)

    def shape(self, operand: Operand, sizes: Iterable[int]) -> list[int]:
        """The shape of an operand when the variables have these sizes."""
        known = {key(layout): size for layout, size in zip(self.layouts, sizes, strict=True)}
        return [_extent(resolve(dim), known) for dim in operand.dims]


def variables(step: Step) -> Variables:
    """The variables of a step, in order of appearance."""
    found: dict[Key, Layout] = {}
    for operand in step.operands():
        for dim in map(resolve, operand.dims):
            if not constant(dim) and free_atoms(dim):
                found.setdefault(key(dim), dim)
    atoms = [atom for layout in found.values() for atom in free_atoms(layout)]
    if len(set(atoms)) == len(atoms):
        return Variables(tuple(found.values()))
    return Variables(tuple(dict.fromkeys(atoms)))


def key(layout: Layout) -> Key:
    """Equal for layouts of the same parts."""
    if isinstance(layout, Atom):
        return id(layout)
    return (type(layout), *map(key, layout.parts))


def signature(step: Step, of: Variables) -> Hashable:
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

    return (step.run, spelt(step.args), tuple((name, spelt(item)) for name, item in sorted(step.kwargs.items())))


def _extent(layout: Layout, known: Mapping[Key, int]) -> int:
    size = known.get(key(layout))
    if size is not None:
        return size
    if isinstance(layout, Atom):
        return layout.size
    parts = [_extent(part, known) for part in layout.parts]
    return math.prod(parts) if isinstance(layout, Product) else sum(parts)
