"""Learning about axes: two layouts are the same thing, an axis is made of others, an axis must not be cut.

A layout says of each index which positions of which axes it is made of; two layouts are the same when they say the
same of every index. `unify` does only what every way of making them the same would have to do, until they are:

- sound: whatever is kept of the axes that are left, both layouts keep the same;
- complete: any other way of writing the axes as products and concatenations of axes that makes the two layouts the
  same is a special case of what is found. An axis keeps at least one position, so a single position stays. What has
  nothing but itself in common (3×4 against 4×3) is fixed, never guessed;
- so the result is the same whatever the order, and learning the same again changes nothing.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise

from secateur.axes.layout import (
    UNIT,
    Atom,
    Concat,
    Contradiction,
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


def hint(layout: Layout, name: str, *factors: str) -> None:
    """Remember what people call the one atom that a layout is, or the factors, if it is a product of so many atoms."""
    layout = resolve(layout)
    if isinstance(layout, Atom):
        layout.hints.setdefault((name, *factors))
    elif isinstance(layout, Product) and len(layout.parts) == len(factors):
        for part, called in zip(layout.parts, factors, strict=True):
            hint(part, called)


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
    """What was learnt about an atom holds for all that it is made of (never itself: every part of it is smaller)."""
    atom.bound = layout
    for reason in atom.notes:
        note(layout, reason)
    for names in atom.hints:
        hint(layout, *names)
    if atom.leaks:
        leak(layout)


def _unify_concats(a: Concat, b: Concat) -> None:
    """Cut both at the boundaries of either; what lies between two boundaries is the same."""
    ends = sorted({*_ends(a), *_ends(b)})
    for x, y in zip(_at(a, ends), _at(b, ends), strict=True):
        unify(x, y)


def _ends(concat: Concat) -> Iterator[int]:
    return accumulate(part.size for part in concat.parts)


def _at(concat: Concat, ends: Sequence[int]) -> list[Layout]:
    """A concat in pieces that end there, which is also where each of its parts does."""
    found: list[Layout] = []
    begin = 0
    for part, end in zip(concat.parts, _ends(concat), strict=True):
        inside = ends[len(found) : bisect_right(ends, end)]
        found += pieces(part, _lengths([begin, *inside]))
        begin = end
    return found


def _lengths(bounds: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(bounds)]


def _unify_products(a: Product, b: Product) -> None:
    """From the left, the first factors are the same, or one is a multiple of the other: (h × t) with that one as h."""
    left, right = list(reversed(a.parts)), list(reversed(b.parts))
    while left and right:
        x, y = resolve(left.pop()), resolve(right.pop())
        if isinstance(x, Product) or isinstance(y, Product):
            _push(left, x)
            _push(right, y)
        elif x.size == y.size:
            unify(x, y)
        elif x.size % y.size == 0:
            head, tail = factor(x, y.size)
            unify(head, y)
            _push(left, tail)
        elif y.size % x.size == 0:
            head, tail = factor(y, x.size)
            unify(x, head)
            _push(right, tail)
        else:
            _unify_staggered(*_to_next_boundary(x, left, y, right))


def _push(stack: list[Layout], layout: Layout) -> None:
    """Put a layout back in front, factor by factor."""
    layout = resolve(layout)
    stack.extend(reversed(layout.parts) if isinstance(layout, Product) else [layout])


def _to_next_boundary(x: Layout, left: list[Layout], y: Layout, right: list[Layout]) -> tuple[Product, Product]:
    """The factors that come before the two sides have a boundary in common."""
    mine, theirs = [x], [y]
    size, other = x.size, y.size
    while size != other:
        if size < other:
            mine.append(left.pop())
            size *= mine[-1].size
        else:
            theirs.append(right.pop())
            other *= theirs[-1].size
    return Product(tuple(mine)), Product(tuple(theirs))


def _unify_staggered(a: Product, b: Product) -> None:
    """(4 × 6) and (6 × 4) are both (2 × !6 × 2): only what both divide into, in front and at the end, can be cut."""
    reason = Contradiction(f"no common refinement of {resolve(a)} and {resolve(b)}")
    before = Atom(math.gcd(a.parts[0].size, b.parts[0].size))
    rests = [Product(side.parts[1:]) for side in (a, b)]
    after = Atom(math.gcd(*(rest.size for rest in rests)))
    for side, rest in zip((a, b), rests, strict=True):
        first = side.parts[0]
        unify(first, Product((before, Atom(first.size // before.size, reason))))
        unify(rest, Product((Atom(rest.size // after.size, reason), after)))


def _unify_product_with_concat(product: Product, concat: Concat) -> None:
    """(h × t) is (h1 × t) + (h2 × t) + … with h = h1 + h2 + …, where h has a part for each part of the concat.

    Where a part ends inside a row of h, that row stays, and t is cut there: (2 × 4) = (3 + 5) is (1 + 1) × (3 + 1).
    """
    head, tail = product.parts[0], Product(product.parts[1:])
    bounds = [divmod(bound, tail.size) for bound in (0, *_ends(concat))]
    rows = sorted({row for row, _ in bounds} | {row + 1 for row, column in bounds if column})
    columns = sorted({column for _, column in bounds} | {tail.size})
    heads: list[Layout] = [Atom(n) if n > 1 else UNIT for n in _lengths(rows)]
    why = f"a part of {concat} ends inside a row of {product}" if len(columns) > 2 else why_fixed(UNIT)
    unify(head, Concat(tuple(_runs(heads, why))))
    tails = pieces(tail, _lengths(columns))

    def between(begin: tuple[int, int], end: tuple[int, int]) -> Iterator[Layout]:
        """What lies there: the rest of a row, whole rows, the beginning of one."""
        (row, column), (last, until) = begin, end
        if column:
            stop = until if row == last else tail.size
            yield from tails[bisect_left(columns, column) : bisect_left(columns, stop)]
            row += 1
        if row < last:
            some = heads[bisect_left(rows, row) : bisect_left(rows, last)]
            yield Product((Concat(tuple(some)), tail))
        if row <= last:
            yield from tails[: bisect_left(columns, until)]

    for part, (begin, end) in zip(concat.parts, pairwise(bounds), strict=True):
        unify(part, Concat(tuple(between(begin, end))))


def _runs(rows: Iterable[Layout], why: str) -> Iterator[Layout]:
    """Single rows side by side as one constant that says why."""
    for single, run in groupby(rows, key=lambda row: row is UNIT):
        if single:
            yield Atom(len(list(run)), why)
        else:
            yield from run


def factor(layout: Layout, head: int) -> tuple[Layout, Layout]:
    """Refine a layout into (head × tail), where `head` divides its size.

    >>> width = Atom(12)
    >>> factor(width, 3)
    (3, 4)
    >>> width
    (3×4)
    """
    pair = Atom(head), Atom(layout.size // head)
    unify(Product(pair), layout)
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
    unify(Concat(parts), layout)
    return [resolve(part) for part in parts]
