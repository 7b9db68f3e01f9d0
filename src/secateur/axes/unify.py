"""Learning about axes: two layouts are the same thing, an axis is made of others, an axis must not be cut.

Every function here is sound: where no common refinement of two layouts exists (3×4 against 4×3), what cannot
be told apart is fixed, never guessed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from secateur.axes.layout import (
    Atom,
    Concat,
    Layout,
    Product,
    atoms,
    constant,
    resolve,
    why_fixed,
)


def fix(layout: Layout, reason: str) -> None:
    """Forbid cutting anything in a layout; the first reason given stays."""
    for atom in atoms(layout):
        if atom.fixed is None:
            atom.fixed = reason


def note(layout: Layout, reason: str) -> None:
    """Remember that cutting anything in a layout changes more than what is removed."""
    for atom in atoms(layout):
        atom.notes.setdefault(reason)


def leak(layout: Layout) -> None:
    """Remember that positions of a layout count even when all that makes them is zero."""
    for atom in atoms(layout):
        atom.leaks = True


def hint(layout: Layout, name: str) -> None:
    """Remember what people call the one atom that a layout is."""
    layout = resolve(layout)
    if isinstance(layout, Atom):
        layout.hints.setdefault(name)


def unify(a: Layout, b: Layout) -> None:
    """Make two layouts of the same size one, by finding their common refinement."""
    a, b = resolve(a), resolve(b)
    if a is b or (not isinstance(a, Atom) and a.same(b)):
        return
    if a.size != b.size:
        raise ValueError(f"layouts of {a.size} and {b.size} positions cannot be the same")
    if constant(a):
        fix(b, why_fixed(a))
    elif constant(b):
        fix(a, why_fixed(b))
    elif isinstance(a, Atom):
        _bind(a, b)
    elif isinstance(b, Atom):
        _bind(b, a)
    elif isinstance(a, Product) and isinstance(b, Product):
        _unify_products(a, b)
    elif isinstance(a, Concat) and isinstance(b, Concat):
        _unify_concats(a, b)
    elif isinstance(a, Product) and isinstance(b, Concat):
        _unify_product_with_concat(a, b)
    elif isinstance(a, Concat) and isinstance(b, Product):
        _unify_product_with_concat(b, a)


def _bind(atom: Atom, layout: Layout) -> None:
    if any(part is atom for part in atoms(layout)):
        raise AssertionError("an axis cannot be a proper part of itself")
    atom.bound = layout
    for reason in atom.notes:
        note(layout, reason)
    for name in atom.hints:
        hint(layout, name)
    if atom.leaks:
        leak(layout)


def _give_up(*layouts: Layout) -> None:
    shown = " and ".join(repr(resolve(layout)) for layout in layouts)
    for layout in layouts:
        fix(layout, f"no common refinement of {shown}")


def _push(queue: deque[Layout], layout: Layout, kind: type[Product] | type[Concat]) -> None:
    """Put a layout back at the front, in normal form, spliced when it is of the queue's own kind."""
    layout = resolve(layout)
    queue.extendleft(reversed(layout.parts) if isinstance(layout, kind) else [layout])


def _unify_products(a: Product, b: Product) -> None:
    left, right = deque[Layout](a.parts), deque[Layout](b.parts)
    while left and right:
        x, y = resolve(left.popleft()), resolve(right.popleft())
        if isinstance(x, Product) or isinstance(y, Product):
            _push(left, x, Product)
            _push(right, y, Product)
        elif x.size == y.size:
            unify(x, y)
        elif x.size % y.size == 0:
            head, tail = factor(x, y.size)
            unify(head, y)
            _push(left, tail, Product)
        elif y.size % x.size == 0:
            head, tail = factor(y, x.size)
            unify(x, head)
            _push(right, tail, Product)
        else:
            _give_up_to_next_boundary(x, left, y, right)


def _give_up_to_next_boundary(x: Layout, left: deque[Layout], y: Layout, right: deque[Layout]) -> None:
    """The factors before the next common boundary have no common refinement; after it, go on."""
    mine, theirs = [x], [y]
    size, other = x.size, y.size
    while size != other:
        if size < other:
            mine.append(left.popleft())
            size *= mine[-1].size
        else:
            theirs.append(right.popleft())
            other *= theirs[-1].size
    _give_up(Product(tuple(mine)), Product(tuple(theirs)))


def _unify_concats(a: Concat, b: Concat) -> None:
    left, right = deque[Layout](a.parts), deque[Layout](b.parts)
    while left and right:
        x, y = resolve(left.popleft()), resolve(right.popleft())
        if isinstance(x, Concat) or isinstance(y, Concat):
            _push(left, x, Concat)
            _push(right, y, Concat)
        elif x.size == y.size:
            unify(x, y)
        elif x.size > y.size:
            head, tail = split(x, y.size)
            unify(head, y)
            _push(left, tail, Concat)
        else:
            head, tail = split(y, x.size)
            unify(x, head)
            _push(right, tail, Concat)


def _unify_product_with_concat(product: Product, concat: Concat) -> None:
    """(h × t) is (h1 × t) + (h2 × t) + … with h = h1 + h2 + …, wherever the parts are multiples of t."""
    for cut in range(1, len(product.parts)):
        tail = Product(product.parts[cut:])
        rows = _rows(concat, tail.size)
        if rows is not None:
            heads = tuple(Atom(row.size // tail.size) for row in rows)
            unify(Product(product.parts[:cut]), Concat(heads))
            for row, head in zip(rows, heads, strict=True):
                unify(row, Product((head, tail)))
            return
    _give_up(product, concat)


def _rows(concat: Concat, size: int) -> list[Layout] | None:
    """The parts of a concat as multiples of a size; parts may make one row of it together."""
    rows: list[Layout] = []
    begun: list[Layout] = []
    for part in concat.parts:
        if not begun and part.size % size == 0:
            rows.append(part)
            continue
        begun.append(part)
        if sum(p.size for p in begun) == size:
            rows.append(Concat(tuple(begun)))
            begun = []
    return None if begun else rows


def factor(layout: Layout, head: int) -> tuple[Layout, Layout]:
    """Refine a layout into (head × tail), where `head` divides its size.

    >>> width = Atom(12)
    >>> factor(width, 3)
    (3, 4)
    >>> width
    (3×4)
    """
    pair = Atom(head), Atom(layout.size // head)
    unify(layout, Product(pair))
    return resolve(pair[0]), resolve(pair[1])


def split(layout: Layout, at: int) -> tuple[Layout, Layout]:
    """Refine a layout into (first `at` positions + the rest).

    >>> width = Atom(12)
    >>> split(width, 5)
    (5, 7)
    >>> width
    (5+7)
    """
    head, tail = pieces(layout, [at, layout.size - at])
    return head, tail


def pieces(layout: Layout, lengths: Sequence[int]) -> list[Layout]:
    """Refine a layout into consecutive pieces.

    >>> width = Atom(12)
    >>> pieces(width, [3, 4, 5])
    [3, 4, 5]
    """
    if len(lengths) == 1:
        return [resolve(layout)]
    parts = tuple(Atom(n) for n in lengths)
    unify(layout, Concat(parts))
    return [resolve(part) for part in parts]
