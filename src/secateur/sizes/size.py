"""Where a size comes from: an `int` that remembers, and the expressions that it remembers.

While a model is traced, every int that its modules hold and every int read from a tensor's shape is a `Size`.
It behaves as the int it is, and arithmetic on it builds an expression, so that

    x.reshape(B, N, 3, self.num_heads, C // self.num_heads)

is seen as [x.shape[0], x.shape[1], 3, blocks.0.attn.num_heads, x.shape[2] // blocks.0.attn.num_heads].
After a cut each expression can be evaluated anew.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from secateur.axes import Atom, Layout, free_atoms, size_after
from secateur.state.held import Place


@dataclass(frozen=True)
class Attr:
    """The value that a place holds."""

    place: Place

    def __str__(self) -> str:
        return str(self.place)


@dataclass(frozen=True, eq=False)
class Dim:
    """The size of a tensor's dimension."""

    layout: Layout

    def __str__(self) -> str:
        return f"a size of {self.layout.size}"


@dataclass(frozen=True)
class Lit:
    """A number whose origin is not known: a literal in somebody's code."""

    value: int | float

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, eq=False)
class Op:
    """Arithmetic on sizes; `ceil` and `round` look at their left side only."""

    symbol: str
    left: Expr
    right: Expr

    def __str__(self) -> str:
        return f"({self.left} {self.symbol} {self.right})"


Expr = Attr | Dim | Lit | Op


def least_ratio(whole: float, part: float) -> float:
    """The least number that times `part` is not below `whole`: rounding must not lose one.

    >>> least_ratio(3072, 768), int(least_ratio(29, 100) * 100), int(29 / 100 * 100)
    (4.0, 29, 28)
    """
    ratio = whole / part
    while ratio * part < whole:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "/": operator.truediv,
    "least ratio": least_ratio,
    "ceil": lambda value, _: math.ceil(value),
    "round": lambda value, _: round(value),
}


def evaluate(expr: Expr, counts: Mapping[Atom, int], held: Callable[[Place], Any]) -> Any:
    """The value of an expression when each axis keeps `counts` and each place holds what `held` says."""
    if isinstance(expr, Lit):
        return expr.value
    if isinstance(expr, Dim):
        return size_after(expr.layout, counts)
    if isinstance(expr, Attr):
        return held(expr.place)
    left, right = evaluate(expr.left, counts, held), evaluate(expr.right, counts, held)
    return ARITHMETIC[expr.symbol](left, right)


def parts(expr: Expr) -> Iterator[Attr | Dim | Lit]:
    """The ends of an expression, in order."""
    if isinstance(expr, Op):
        yield from parts(expr.left)
        yield from parts(expr.right)
    else:
        yield expr


def words(expr: Expr, name: Callable[[Layout], str]) -> str:
    """An expression in words, with a name for each dimension's layout."""
    if isinstance(expr, Op):
        return f"({words(expr.left, name)} {expr.symbol} {words(expr.right, name)})"
    return name(expr.layout) if isinstance(expr, Dim) else str(expr)


def places(expr: Expr) -> list[Place]:
    """The places that an expression reads, each once."""
    return list(dict.fromkeys(part.place for part in parts(expr) if isinstance(part, Attr)))


def expr_atoms(expr: Expr) -> list[Atom]:
    """The axes whose sizes an expression reads, each once, as far as they may be cut."""
    found = (atom for part in parts(expr) if isinstance(part, Dim) for atom in free_atoms(part.layout))
    return list(dict.fromkeys(found))


class Listener(Protocol):
    """What wants to know of sizes that are used in ways that arithmetic alone does not show."""

    def on_value(self, expr: Expr, use: str) -> None:
        """The size became a float: it will be used as a value."""

    def on_leak(self, expr: Expr) -> None:
        """The size became something that has no memory: text, or a key."""

    def on_comparison(self, symbol: str, left: Expr, right: Expr, outcome: bool) -> None:
        """Control flow may depend on how two sizes compare."""

    def number(self, value: float, expr: Expr) -> float:
        """What a float that was made of sizes is to be: it may remember, too."""


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Remembering:
    """A number that remembers where it came from, as long as somebody listens."""

    expr: Expr
    listener: Listener | None

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Size(Remembering, int):
    """An int that remembers where it came from."""

    def __new__(cls, value: Any, expr: Expr | None = None, listener: Listener | None = None) -> Size:
        if expr is None:  # code that wants a number of the same type, as `type(n)(2)` does
            return int(value)  # type: ignore[return-value]
        self = super().__new__(cls, value)
        self.expr = expr
        self.listener = listener
        return self

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (plain(self),)

    def __repr__(self) -> str:
        return int.__repr__(_leak(self))

    def __format__(self, spec: str) -> str:
        return int.__format__(_leak(self), spec)

    def __hash__(self) -> int:
        return int.__hash__(_leak(self))

    def bit_length(self) -> int:
        return as_value(self, "bit_length()").bit_length()

    def __bool__(self) -> bool:
        outcome = plain(self) != 0
        if self.listener is not None:
            self.listener.on_comparison("!=", self.expr, Lit(0), outcome)
        return outcome

    def __float__(self) -> float:
        return float(as_value(self, "float()"))

    def __int__(self) -> int:
        return as_value(self, "int()")

    def __pos__(self) -> Size:
        return self

    def __abs__(self) -> Any:
        return self if plain(self) >= 0 else -self

    def __round__(self, digits: Any = None) -> Any:
        return self if digits is None else round(as_value(self, "round()"), digits)

    def __ceil__(self) -> Size:
        return self

    def __floor__(self) -> Size:
        return self

    def __trunc__(self) -> Size:
        return self

    def __rshift__(self, bits: int) -> Any:
        return self // (1 << plain(bits))

    def __lshift__(self, bits: int) -> Any:
        return self * (1 << plain(bits))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """NumPy computes with the number, not with the size."""
        numbers = [as_value(i, ufunc.__name__) if isinstance(i, Size) else i for i in inputs]
        return getattr(ufunc, method)(*numbers, **kwargs)


def plain(value: int) -> int:
    """The int itself, without its memory; also of NumPy's.

    >>> import numpy
    >>> plain(numpy.int64(3))
    3
    """
    return int.__index__(operator.index(value))


def expr_of(value: float) -> Expr:
    """What a number is made of, if it knows; any other is a literal."""
    if isinstance(value, Remembering):
        return value.expr
    return Lit(plain(value) if isinstance(value, int) else value)


def as_value(size: Size, use: str) -> int:
    if size.listener is not None:
        size.listener.on_value(size.expr, use)
    return plain(size)


def _as_float(size: Size, symbol: str, other: Any, swapped: bool) -> float:
    """A float made of a size."""
    mine, theirs = as_value(size, symbol), plain(other) if isinstance(other, int) else float(other)
    left, right = (theirs, mine) if swapped else (mine, theirs)
    value = float(ARITHMETIC[symbol](left, right))
    if size.listener is None:
        return value
    first, second = (other, size) if swapped else (size, other)
    return size.listener.number(value, Op(symbol, expr_of(first), expr_of(second)))


def _leak(size: Size) -> int:
    if size.listener is not None:
        size.listener.on_leak(size.expr)
    return size


def _arithmetic(symbol: str, swapped: bool) -> Callable[[Size, Any], Any]:
    compute = ARITHMETIC[symbol]

    def method(self: Size, other: Any) -> Any:
        if not isinstance(other, int):
            return _as_float(self, symbol, other, swapped) if isinstance(other, float) else NotImplemented
        left, right = (other, self) if swapped else (self, other)
        result = compute(plain(left), plain(right))
        if isinstance(result, float):  # a negative power
            return _as_float(self, symbol, other, swapped)
        if self.listener is None:
            return result
        return Size(result, Op(symbol, expr_of(left), expr_of(right)), self.listener)

    return method


def _comparison(symbol: str) -> Callable[[Size, Any], Any]:
    compute = COMPARISONS[symbol]

    def method(self: Size, other: Any) -> Any:
        if isinstance(other, float) and (isinstance(other, Remembering) or math.isfinite(other)):
            outcome = compute(plain(self), float(other))
            if self.listener is not None:
                self.listener.on_comparison(symbol, self.expr, expr_of(other), outcome)
            return outcome
        if not isinstance(other, int):
            return getattr(int, DUNDER[symbol])(self, other)
        outcome = compute(plain(self), plain(other))
        if self.listener is not None:
            self.listener.on_comparison(symbol, self.expr, expr_of(other), outcome)
        return outcome

    return method


def _true_division(swapped: bool) -> Callable[[Size, Any], Any]:
    def method(self: Size, other: Any) -> Any:
        return _as_float(self, "/", other, swapped) if isinstance(other, int | float) else NotImplemented

    return method


def _bits(name: str) -> Callable[[Size, Any], Any]:
    compute = getattr(int, name)

    def method(self: Size, other: Any) -> Any:
        return compute(as_value(self, name), as_value(other, name) if isinstance(other, Size) else other)

    return method


def _negative(self: Size) -> Any:
    return _arithmetic("*", swapped=False)(self, -1)


DUNDER = {"==": "__eq__", "!=": "__ne__", "<": "__lt__", "<=": "__le__", ">": "__gt__", ">=": "__ge__"}
_NAMES = {"+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod", "**": "pow"}

for _symbol, _name in _NAMES.items():
    setattr(Size, f"__{_name}__", _arithmetic(_symbol, swapped=False))
    setattr(Size, f"__r{_name}__", _arithmetic(_symbol, swapped=True))
for _symbol, _name in DUNDER.items():
    setattr(Size, _name, _comparison(_symbol))
Size.__truediv__ = _true_division(swapped=False)  # type: ignore[method-assign,assignment]
Size.__rtruediv__ = _true_division(swapped=True)  # type: ignore[method-assign,assignment]
Size.__neg__ = _negative  # type: ignore[method-assign,assignment]
for _name in ("and", "or", "xor", "rand", "ror", "rxor"):
    setattr(Size, f"__{_name}__", _bits(f"__{_name}__"))
