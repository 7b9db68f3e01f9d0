"""Sums of products of layout sizes: what anything that is counted in elements costs, for any cut."""

import math
from collections.abc import Callable, Mapping, Sequence

from secateur.axes.layout import Atom, Concat, Layout, constant, free_atoms, resolve

Counts = Mapping[Atom, int]
Sizer = Callable[[Counts], int]


class Polynomial:
    """A sum of products of layout sizes.

    >>> a, b = Atom(4), Atom(3)
    >>> area = Polynomial([(2, (a, b)), (1, (b,))])
    >>> area({}), area({a: 2}), area.saved(a, 2)
    (27, 15, 12)
    >>> area.difference({a: 2}, {b: 1})
    10
    """

    def __init__(self, terms: Sequence[tuple[int, Sequence[Layout]]]) -> None:
        self._layouts: list[Layout] = []
        self._sizers: list[Sizer] = []
        index: dict[int, int] = {}
        known: dict[int, Sizer] = {}
        merged: dict[tuple[int, ...], int] = {}
        for factor, layouts in terms:
            numbers = []
            for layout in map(resolve, layouts):
                if constant(layout):
                    factor *= layout.size
                else:
                    if id(layout) not in index:
                        index[id(layout)] = len(self._layouts)
                        self._layouts.append(layout)
                        self._sizers.append(_sizer(layout, known))
                    numbers.append(index[id(layout)])
            key = tuple(numbers)
            merged[key] = merged.get(key, 0) + factor
        self._terms = list(merged.items())
        self._full = [layout.size for layout in self._layouts]
        self._of_atom: dict[Atom, tuple[list[int], list[int]]] | None = None

    def __call__(self, counts: Counts) -> int:
        """The value when each axis keeps `counts`."""
        sizes = [sizer(counts) for sizer in self._sizers] if counts else self._full
        return sum(factor * math.prod(sizes[i] for i in numbers) for numbers, factor in self._terms)

    def difference(self, counts: Counts, change: Counts) -> int:
        """How much less it is when, from `counts` on, some axes change."""
        touched = self._touched()
        found = dict.fromkeys(t for atom in change for t in touched.get(atom, ([], []))[1])
        after = {**counts, **change}
        sizes: dict[int, tuple[int, int]] = {}
        total = 0
        for t in found:
            numbers, factor = self._terms[t]
            for i in numbers:
                if i not in sizes:
                    sizes[i] = (self._sizers[i](counts), self._sizers[i](after))
            total += factor * (math.prod(sizes[i][0] for i in numbers) - math.prod(sizes[i][1] for i in numbers))
        return total

    def saved(self, atom: Atom, count: int) -> int:
        """How much less it is when one axis alone keeps `count`."""
        layouts, terms = self._touched().get(atom, ([], []))
        sizes = {i: self._sizers[i]({atom: count}) for i in layouts}
        saved = 0
        for t in terms:
            numbers, factor = self._terms[t]
            before = math.prod(self._full[i] for i in numbers)
            saved += factor * (before - math.prod(sizes.get(i, self._full[i]) for i in numbers))
        return saved

    def _touched(self) -> dict[Atom, tuple[list[int], list[int]]]:
        """For each axis, the layouts and the terms that it is part of."""
        if self._of_atom is None:
            atoms = [free_atoms(layout) for layout in self._layouts]
            self._of_atom = {}
            for i, found in enumerate(atoms):
                for atom in found:
                    self._of_atom.setdefault(atom, ([], []))[0].append(i)
            for t, (numbers, _) in enumerate(self._terms):
                for atom in dict.fromkeys(atom for i in numbers for atom in atoms[i]):
                    self._of_atom[atom][1].append(t)
        return self._of_atom


def _sizer(layout: Layout, known: dict[int, Sizer]) -> Sizer:
    """The size of a layout as a function of counts, with its structure looked up once."""
    if id(layout) not in known:
        known[id(layout)] = _made(layout, known)
    return known[id(layout)]


def _made(layout: Layout, known: dict[int, Sizer]) -> Sizer:
    if isinstance(layout, Atom):
        atom, size = layout, layout.size
        return lambda counts: counts.get(atom, size)
    parts = [_sizer(part, known) for part in layout.parts]
    if isinstance(layout, Concat):
        return lambda counts: sum(part(counts) for part in parts)
    return lambda counts: math.prod(part(counts) for part in parts)
