"""Layouts: how the positions of one tensor dimension are made of axes.

    layout := Atom(n)                 an axis of n positions
            | Product(layout, ...)    row-major flatten:   (heads × head_dim),  (channels × 7*7)
            | Concat(layout, ...)     one after the other: (q + k + v)

>>> heads, dims = Atom(2), Atom(3)
>>> layout = Product((heads, dims))
>>> keep_mask(layout, {heads: np.array([True, False])}).astype(int)
array([1, 1, 1, 0, 0, 0])

An `Atom` is a cell: learning that it is composed (or is another atom) binds it, and every layout that mentions
it sees that at once. `resolve` gives a layout's present normal form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from operator import is_

import numpy as np
from numpy.typing import NDArray


class Inherent(str):
    """A reason that nobody asks for: of a dimension that no one would think of cutting, such as a kernel's height."""

    __slots__ = ()


class Boundary(str):
    """A reason that names no code: of a dimension that the model shares with its caller."""

    __slots__ = ()


class Contradiction(str):
    """A reason of positions that are used in two ways which exclude each other."""

    __slots__ = ()


class Atom:
    """An axis of `size` positions, until it is bound to a layout that says what it is made of."""

    __slots__ = ("bound", "fixed", "hints", "leaks", "notes", "size")

    def __init__(self, size: int, fixed: str | None = None) -> None:
        self.size = size
        self.bound: Layout | None = None
        self.fixed: str | None = fixed  # why it must not be cut
        self.notes: dict[str, None] = {}  # why cutting it is not exact, in order
        self.hints: dict[tuple[str, ...], None] = {}  # what it is called, in order; then, what its factors would be
        self.leaks = False  # whether a position counts even when all that makes it is zero

    def __repr__(self) -> str:
        return f"{'' if self.fixed is None else '!'}{self.size}" if self.bound is None else repr(resolve(self))


class _Compound:
    __slots__ = ("parts", "size")
    parts: tuple[Layout, ...]
    size: int

    def same(self, other: Layout) -> bool:
        """The same parts, by identity: what makes unifying them again free."""
        return (
            type(self) is type(other)
            and len(self.parts) == len(other.parts)
            and all(map(_same, self.parts, other.parts))
        )


class Product(_Compound):
    """Row-major flatten of its parts; the empty product is the one position of a dimension of size 1."""

    __slots__ = ()

    def __init__(self, parts: tuple[Layout, ...]) -> None:
        self.parts = parts
        self.size = math.prod(part.size for part in parts)

    def __repr__(self) -> str:
        return "(" + "×".join(map(repr, self.parts)) + ")" if self.parts else "1"


class Concat(_Compound):
    """Its parts, one after the other; the empty concatenation is a dimension of size 0."""

    __slots__ = ()

    def __init__(self, parts: tuple[Layout, ...]) -> None:
        self.parts = parts
        self.size = sum(part.size for part in parts)

    def __repr__(self) -> str:
        return "(" + "+".join(map(repr, self.parts)) + ")"


Layout = Atom | Product | Concat
Mask = NDArray[np.bool_]
Index = NDArray[np.int64]

UNIT = Product(())
_SINGLY = "its positions are used one by one"
EMPTY = Concat(())


def _same(a: Layout, b: Layout) -> bool:
    return a is b or (not isinstance(a, Atom) and a.same(b))


def constant(layout: Layout) -> bool:
    """Whether nothing in a resolved layout can be cut (normal form makes every such layout an atom or a unit)."""
    return layout.fixed is not None if isinstance(layout, Atom) else not layout.parts


def why_fixed(*layouts: Layout) -> str:
    """Of the reasons in some layouts for not cutting them, the one that is worth telling most."""
    found = [atom for layout in layouts for atom in atoms(layout) if atom.fixed]
    told = min(found, key=_worth_telling).fixed if found else None  # of its own kind, wherever it is passed on to
    return told or "a single position"


def inherent(layout: Layout) -> bool:
    """Whether everything that is fixed in a layout is so by its nature, with nothing to tell about it."""
    found = [atom.fixed for atom in atoms(layout) if atom.fixed]
    return bool(found) and all(isinstance(reason, Inherent) for reason in found)


def resolve(layout: Layout) -> Layout:
    """The normal form: bound atoms replaced, nested parts of the same kind spliced in, constants merged.

    Every part of a compound in normal form is smaller than the compound, so nothing can become a part of itself.
    """
    if not isinstance(layout, Atom):
        return _flat(layout) if layout.parts else layout
    if layout.bound is None:
        return layout if layout.size > 1 else (UNIT if layout.size else EMPTY)
    now = resolve(_end(layout))
    while isinstance(layout, Atom) and layout.bound is not None:
        layout.bound, layout = now, layout.bound
    return now


def _flat(layout: Product | Concat) -> Layout:
    """The normal form of a compound. What is nested in its own kind waits in a list, however deep it is."""
    kind = type(layout)
    if kind is Product and layout.size == 0:
        return EMPTY
    parts: list[Layout] = []
    todo = list(reversed(layout.parts))
    while todo:
        part = todo.pop()
        if isinstance(part, Atom) and part.bound is None and part.fixed is None and part.size > 1:
            parts.append(part)
            continue
        end = _end(part)
        now = end if type(end) is kind else resolve(part)
        if isinstance(now, kind):
            todo.extend(reversed(now.parts))
        elif parts and constant(now) and constant(parts[-1]):
            parts[-1] = _merged(kind, parts[-1], now)
        else:
            parts.append(now)
    if len(parts) == 1:
        return parts[0]
    unchanged = len(parts) == len(layout.parts) and all(map(is_, parts, layout.parts))
    return layout if unchanged else kind(tuple(parts))


def _end(layout: Layout) -> Layout:
    """What an atom is bound to in the end."""
    while isinstance(layout, Atom) and layout.bound is not None:
        layout = layout.bound
    return layout


def _merged(kind: type[Product] | type[Concat], a: Layout, b: Layout) -> Atom:
    """Two constants side by side, as one, with the reason that says more."""
    given = [each for each in (a, b) if isinstance(each, Atom)]
    told = min(given, key=_worth_telling, default=None)
    return Atom(kind((a, b)).size, _SINGLY if told is None else told.fixed)


def _worth_telling(fixed: Atom) -> tuple[int, int]:
    """What sorts constants by what their reasons say: contradictions, then what names code, of these the largest."""
    reason = fixed.fixed
    if reason == _SINGLY:
        return 3, -fixed.size
    ranks = ((Contradiction, 0), (Boundary, 2), (Inherent, 4))
    return next((rank for kind, rank in ranks if isinstance(reason, kind)), 1), -fixed.size


def copied(layout: Layout, made: dict[Atom, Atom]) -> Layout:
    """A layout of other axes, which what is learnt about it does not reach; `made` says which stand for which."""
    layout = resolve(layout)
    if isinstance(layout, Atom):
        return made.setdefault(layout, Atom(layout.size, layout.fixed))
    return type(layout)(tuple(copied(part, made) for part in layout.parts))


def atoms(layout: Layout) -> Iterator[Atom]:
    """Every atom of a layout, in order, repetitions included."""
    layout = resolve(layout)
    return iter((layout,)) if isinstance(layout, Atom) else _inside(layout)


def _inside(layout: Product | Concat) -> Iterator[Atom]:
    """Those of a compound in normal form, whose parts are, too."""
    for part in layout.parts:
        if isinstance(part, Atom):
            yield part
        else:
            yield from _inside(part)


def free_atoms(layout: Layout) -> list[Atom]:
    """The atoms of a layout that may be cut, each once, in order."""
    layout = resolve(layout)
    if isinstance(layout, Atom):
        return [layout] if layout.fixed is None else []
    return list(dict.fromkeys(atom for atom in _inside(layout) if atom.fixed is None))


def size_after(layout: Layout, counts: Mapping[Atom, int]) -> int:
    """How many positions a layout has when each atom keeps `counts[atom]` (all, where it is not named).

    >>> a, b = Atom(4), Atom(3)
    >>> size_after(Concat((a, Product((a, b)))), {a: 2})
    8
    """
    layout = resolve(layout)
    if isinstance(layout, Atom):
        return counts.get(layout, layout.size)
    sizes = (size_after(part, counts) for part in layout.parts)
    return math.prod(sizes) if isinstance(layout, Product) else sum(sizes)


def keep_mask(layout: Layout, masks: Mapping[Atom, Mask]) -> Mask:
    """Which positions of a layout stay: the outer AND over a product, the concatenation over a concat."""
    layout = resolve(layout)
    if isinstance(layout, Atom):
        mask = masks.get(layout)
        return np.ones(layout.size, np.bool_) if mask is None else mask
    parts = [keep_mask(part, masks) for part in layout.parts]
    if isinstance(layout, Concat):
        return np.concatenate(parts) if parts else np.ones(0, np.bool_)
    mask = np.ones(1, np.bool_)
    for part in parts:
        mask = np.logical_and.outer(mask, part).reshape(-1)
    return mask


def owned(layout: Layout) -> list[tuple[Atom, Index, Index]]:
    """For each place of an atom in a layout, the indices that it has there and which of its positions each belongs to.

    >>> a, b = Atom(2), Atom(3)
    >>> [(where.tolist(), position.tolist()) for _, where, position in owned(Concat((a, b)))]
    [([0, 1], [0, 1]), ([2, 3, 4], [0, 1, 2])]
    """
    layout = resolve(layout)
    if isinstance(layout, Atom):
        every = np.arange(layout.size)
        return [(layout, every, every)]
    found: list[tuple[Atom, Index, Index]] = []
    before = 1 if isinstance(layout, Product) else 0
    for part in layout.parts:
        after = layout.size // (before * part.size) if isinstance(layout, Product) else 1
        for atom, where, position in owned(part):
            if isinstance(layout, Product):
                outer = np.add.outer(np.arange(before) * part.size, where).reshape(-1) * after
                where = np.add.outer(outer, np.arange(after)).reshape(-1)
                found.append((atom, where, np.tile(np.repeat(position, after), before)))
            else:
                found.append((atom, where + before, position))
        before = before * part.size if isinstance(layout, Product) else before + part.size
    return found


def positions(layout: Layout) -> list[tuple[Atom, Index]]:
    """For each place of an atom in a layout, which of the atom's positions each index belongs to (-1: none).

    >>> a, b = Atom(2), Atom(3)
    >>> [index.tolist() for _, index in positions(Concat((a, b)))]
    [[0, 1, -1, -1, -1], [-1, -1, 0, 1, 2]]
    """
    found = []
    for atom, where, position in owned(layout):
        whole = np.full(layout.size, -1)
        whole[where] = position
        found.append((atom, whole))
    return found
