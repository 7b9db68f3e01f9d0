"""What a tracing run says about sizes: which number must be the size of which layout, now and after any cut.

Ops learn about layouts; the torch functions that lead to them are called with numbers. A number that arrives as a size
is held against the layout that it is the size of (`expect`), and where the number knows its origin that makes an
equation: `blocks.0.attn.num_heads == heads`. A number without an origin is a literal, and fixes what it counts.
"""

from __future__ import annotations

import numbers
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from secateur.axes import Atom, Concat, Layout, atoms, constant, fix, free_atoms, pieces, resolve
from secateur.sizes.real import Real
from secateur.sizes.size import Dim, Expr, Lit, Op, Size, expr_of, plain

_OWN = str(Path(__file__).parents[1])
_RUNS = {(str(Path(_OWN, "tracing", file)), "_run") for file in ("capture.py", "rehearsal.py", "constructor.py")}
_TORCH = str(Path(torch.__file__).parent)
_MODELS, _RUNNING, _EVALUATED, _OTHER = range(4)  # kinds of files


def is_capture(frame: FrameType) -> bool:
    """Whether a frame is the one that runs the model; below it is whoever asked for the trace."""
    return (frame.f_code.co_filename, frame.f_code.co_name) in _RUNS


@dataclass(frozen=True)
class SizeEquation:
    """After any cut, `expr` must come out as the size of `layout`."""

    expr: Expr
    layout: Layout
    where: str
    why: str = ""  # what there is to say of a number that is no literal but has no origin either


@dataclass(frozen=True)
class SizeComparison:
    """After any cut, the comparison must come out as it did, or the model takes another branch."""

    symbol: str
    left: Expr
    right: Expr
    outcome: bool
    where: str
    why: str = ""  # as of an equation


@dataclass(frozen=True)
class ValueUse:
    """A size that was used as a number: what it counts can be cut, but not exactly."""

    expr: Expr
    use: str
    where: str


class Ear:
    """What the sizes of one run tell of their use. When it is gone, so are all of them."""

    def __init__(self, explainer: Explainer) -> None:
        self.explainer: Explainer | None = explainer

    def on_value(self, expr: Expr, use: str) -> None:
        """A size was used as a number."""
        if self.explainer is not None:
            self.explainer.on_value(expr, use)

    def on_leak(self, expr: Expr) -> None:
        """A size became something that has no memory: text, or a key."""
        if self.explainer is not None:
            self.explainer.leaks.append(expr)

    def on_comparison(self, symbol: str, left: Expr, right: Expr, outcome: bool) -> None:
        """Two sizes were compared."""
        if self.explainer is not None:
            where = self.explainer.where()
            literal = next((side.value for side in (left, right) if isinstance(side, Lit)), None)
            why = self.explainer.unknown(literal, where) if type(literal) is int else ""
            self.explainer.comparisons.append(SizeComparison(symbol, left, right, outcome, where, why))

    def number(self, value: float, expr: Expr) -> float:
        """A float was made of sizes."""
        if self.explainer is None:
            return value
        return Real(value, expr, self) if self.explainer.reals else self.explainer.tell(value)


@dataclass
class Explainer:
    """Collects what a run says about sizes."""

    equations: list[SizeEquation] = field(default_factory=list)
    comparisons: list[SizeComparison] = field(default_factory=list)
    value_uses: list[ValueUse] = field(default_factory=list)
    leaks: list[Expr] = field(default_factory=list)  # sizes that became something that has no memory
    unexplained: bool = False  # whether a number was met that has no origin and may be made of sizes
    judges: bool = True  # whether what happens now counts for what is exact
    reals: bool = False  # whether floats made of sizes remember, too
    _ear: Ear | None = None
    _told: dict[int, float] = field(default_factory=dict)  # numbers that are known to be made of sizes, by identity
    made: set[Atom] = field(default_factory=set)  # axes that calls made from nothing
    _fresh: dict[Atom, None] = field(default_factory=dict)  # those of the present call
    _explained: list[Layout] = field(default_factory=list)  # layouts whose size the present call was given
    _asked: Counter[int] = field(default_factory=Counter)  # expressions whose meaning is known in it, by identity

    def exprs(self) -> Iterator[Expr]:
        """Every expression that was given as a size, compared, or used as a number."""
        yield from (equation.expr for equation in self.equations)
        yield from (side for one in self.comparisons for side in (one.left, one.right))
        yield from (use.expr for use in self.value_uses)

    # sizes that remember --------------------------------------------------------------------------------------------

    def listen(self, made: list[weakref.ref[Any]]) -> None:
        """From now on sizes tell of their use; `made` gets a weak reference that is dead when none is left."""
        self._ear = Ear(self)
        made.append(weakref.ref(self._ear))

    def stop_listening(self) -> None:
        """Sizes that somebody still has are silent from now on."""
        if self._ear is not None:
            self._ear.explainer = None
        self._ear = None

    def size(self, value: int, expr: Expr) -> Size:
        """A size that remembers where it came from."""
        return Size(value, expr, self._ear)

    def real(self, value: float, expr: Expr) -> Real:
        """A float that does."""
        return Real(value, expr, self._ear)

    def on_value(self, expr: Expr, use: str) -> None:
        """A size was used as a number."""
        if self.judges:
            self.value_uses.append(ValueUse(expr, use, self.where()))

    def tell(self, number: float) -> float:
        """A number is made of sizes that have told of it."""
        self._told[id(number)] = number
        return number

    def is_told(self, number: object) -> bool:
        """Whether it is that very number."""
        return id(number) in self._told

    # what a torch function was called with ------------------------------------------------------------------------

    def expect(self, size: Any, layout: Layout, given: Any = None) -> None:
        """A size argument that must be the size of a layout, now and after any cut; `given`: what it is made of."""
        layout = resolve(layout)
        self._ask(size)
        if not isinstance(size, int):
            if not isinstance(size, numbers.Integral):
                return
            size = int(size)
        if plain(size) == -1:
            return
        self._explained.append(layout)
        expr = expr_of(size)
        if constant(layout) and isinstance(expr, Lit):
            return
        if isinstance(expr, Dim) and resolve(expr.layout) is layout:
            return
        where = self.where()
        why = self.unknown(plain(size), where, given) if isinstance(expr, Lit) else ""
        self.equations.append(SizeEquation(expr, layout, where, why))

    def unknown(self, number: int, where: str, given: int | None = None) -> str:
        """What there is to say of a number that has no origin; nothing, if it (or what is `given`) is a literal."""
        if _is_written(plain(number if given is None else given)):
            return ""
        self.unexplained = True
        return (
            f"where the {number} at {where} comes from is not known: it went through a float, NumPy, a tensor or a "
            "variable outside of the model; hold it in an attribute to make it cuttable"
        )

    def expect_all(self, given: Sequence[Any], layouts: Sequence[Layout]) -> None:
        """Size arguments, each of one layout."""
        for size, layout in zip(given, layouts, strict=False):
            self.expect(size, layout)

    def expect_slice(self, layout: Layout, start: Any, stop: Any, step: Any = None) -> None:
        """Bounds of a slice: the sizes of the pieces before, inside and after it."""
        self._ask(start, stop)
        if constant(resolve(layout)):
            return
        n = layout.size
        if step not in (None, 1):
            if start is not None and start >= 0:
                self.pin(start, "the phase of a stride")
            return
        begin = 0 if start is None else min(max(plain(start) + n if start < 0 else plain(start), 0), n)
        end = n if stop is None else min(max(plain(stop) + n if stop < 0 else plain(stop), begin), n)
        before, inside, after = pieces(layout, [begin, end - begin, n - end])
        if start is not None:
            if plain(start) >= 0:
                self._expect_clipped(start, before, n)
            else:
                self._expect_clipped(-start, Concat((inside, after)), n)
        if stop is not None:
            if plain(stop) >= 0:
                self._expect_clipped(stop, Concat((before, inside)), n)
            else:
                self._expect_clipped(-stop, after, n)

    def _expect_clipped(self, bound: int, layout: Layout, n: int) -> None:
        """A slice bound; one beyond the end means the end, wherever that is."""
        if plain(bound) == 0 or (plain(bound) > n and not isinstance(bound, Size)):
            return
        if plain(bound) > n:
            self.pin(bound, "a bound beyond the end")
            return
        self.expect(bound, layout)

    def expect_position(self, layout: Layout, index: Any) -> None:
        """A position by number: as many must stay before it (or after it, counted from the end)."""
        self._ask(index)
        if constant(resolve(layout)):
            return
        n = layout.size
        at = plain(index) % n
        before, _, after = pieces(layout, [at, 1, n - at - 1])
        if plain(index) >= 0:
            self.expect(index, before)
        else:
            self.expect(-index - 1, after, index)

    def expect_same(self, layout: Layout, other: Layout) -> None:
        """As many positions as another layout has, whichever they are."""
        self._explained += [layout, other]
        if not (constant(resolve(layout)) and constant(resolve(other))) and resolve(layout) is not resolve(other):
            self.equal_counts(layout, other, self.where())

    def expect_equal_parts(self, parts: Sequence[Layout]) -> None:
        """Parts of equal length keep equally many positions; where one is longer, how many must not change."""
        if len({part.size for part in parts}) == 1:
            for part in parts[1:]:
                self.equal_counts(parts[0], part, f"equal parts are made ({self.where()})")
        else:
            self._explained += parts
            where = self.where()
            why = f"parts of unequal length are made, which a cut would make others ({where})"
            whole = (part for part in map(resolve, parts) if not constant(part))
            self.equations += [SizeEquation(Lit(part.size), part, where, why) for part in whole]

    def pin(self, size: Any, why: str) -> None:
        """A size whose value must not change."""
        self._ask(size)
        if isinstance(size, Size):
            where = self.where()
            self.equations.append(SizeEquation(size.expr, Atom(plain(size), f"{why} ({where})"), where))

    def _ask(self, *sizes: Any) -> None:
        """What these sizes mean to the present call is known: they, and what they are made of, are no mere numbers."""
        todo: list[Expr] = [size.expr for size in sizes if isinstance(size, Size)]
        while todo:
            expr = todo.pop()
            self._asked[id(expr)] += 1
            todo += (expr.left, expr.right) if isinstance(expr, Op) else ()

    def loose(self, size: Size, use: str) -> None:
        """A size that the present call was given is a number like any other, if nobody asked what it is the size of."""
        self._asked[id(size.expr)] -= 1
        if self._asked[id(size.expr)] < 0:
            self.on_value(size.expr, use)

    # what an op demands of the sizes of its operands ---------------------------------------------------------------

    def equal_counts(self, a: Layout, b: Layout, where: str) -> None:
        """Two layouts must keep equally many positions, whichever they are."""
        self.equations.append(SizeEquation(Dim(a), b, where))

    def compare(self, layout: Layout, symbol: str, other: Layout | int, outcome: bool = True) -> None:
        """How a layout's size compares, with a number or with another's, must stay as it is."""
        self._ask(other)
        if not constant(resolve(layout)):
            right = expr_of(other) if isinstance(other, int) else Dim(other)
            self.comparisons.append(SizeComparison(symbol, Dim(layout), right, outcome, self.where()))

    def multiple(self, layout: Layout, of: int) -> None:
        """A kernel takes only multiples of a number, if it was given one."""
        if not constant(resolve(layout)) and layout.size % of == 0:
            rest = Op("%", Dim(layout), Lit(of))
            self.comparisons.append(SizeComparison("==", rest, Lit(0), True, self.where()))

    # axes made from nothing ----------------------------------------------------------------------------------------

    def fresh(self, size: int) -> Atom:
        """A new axis, whose size the function that was called must explain."""
        axis = Atom(size)
        self._fresh[axis] = None
        self.made.add(axis)
        return axis

    def account(self, name: str, given: Callable[[], Iterable[Layout]]) -> None:
        """At the end of a call: a new axis that is neither explained nor one of what was given must stay whole."""
        open_ = [atom for axis in self._fresh for atom in free_atoms(axis)] if self._fresh else []
        if open_:
            accounted = {atom for layout in (*self._explained, *given()) for atom in atoms(layout)}
            open_ = [atom for atom in open_ if atom not in accounted]
        self._fresh, self._explained = {}, []
        if self._asked:
            self._asked = Counter()
        for atom in open_:
            fix(atom, f"{name}: where its size comes from is not known ({self.where()})")

    def where(self) -> str:
        """File and line of the innermost frame of the model's code that is neither torch's nor ours.

        Code that was made without a file, as `torch.export` does, is named where no file is in sight.
        """
        frame = of_the_model(1)
        if frame is None:
            return ""
        return f"{_file(frame.f_code.co_filename)}:{frame.f_lineno}"


def of_the_model(above: int) -> FrameType | None:
    """The innermost frame of the model's code, from so many frames above the caller's on."""
    frame: FrameType | None = sys._getframe(above + 1)
    made: FrameType | None = None
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == _MODELS:
            return frame
        if kind == _RUNNING and is_capture(frame):
            break
        made = made or (frame if kind == _EVALUATED else None)
        frame = frame.f_back
    return made


@lru_cache(1024)
def _file(name: str) -> str:
    return name if name.startswith("<") else Path(name).name


@lru_cache(1024)
def _kind(file: str) -> int:
    """Whose code a file has."""
    if not file.startswith((_OWN, _TORCH, "<")):
        return _MODELS
    return _RUNNING if any(file == running for running, _ in _RUNS) else _EVALUATED if file[:5] == "<eval" else _OTHER


def _is_written(number: int) -> bool:
    """Whether a number is a constant of the model's code that is running."""
    frame = of_the_model(1)
    return frame is None or (int, number) in constants(frame.f_code)


@cache
def constants(code: CodeType) -> frozenset[tuple[type, complex]]:
    """The numbers that are written in some code, and what is negative of them."""
    return frozenset(each_number(code.co_consts))


def each_number(items: Iterable[Any]) -> Iterator[tuple[type, complex]]:
    """Numbers of a code's constants, with their kinds, and what is negative of them."""
    for each in items:
        if type(each) is tuple:
            yield from each_number(each)
        elif type(each) in (int, float, complex):
            yield from ((type(each), each), (type(each), -each))
