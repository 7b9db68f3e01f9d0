"""Floats that remember where they came from: a constructor's `int(config.hidden_size * config.mlp_ratio)`.

In a model's forward a float is a number like any other. In its constructor it is mostly a size on its way: divided,
multiplied by a ratio, and made whole again. So there floats remember as sizes do, and so does the `int` that makes them
whole, which takes the place of Python's own in the modules whose code is followed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from secateur.sizes.size import (
    ARITHMETIC,
    COMPARISONS,
    DUNDER,
    Expr,
    Listener,
    Lit,
    Op,
    Remembering,
    Size,
    expr_of,
    plain,
)


class Real(Remembering, float):
    """A float that remembers where it came from.

    >>> from secateur.sizes.size import Attr
    >>> from secateur.state.held import Place
    >>> ratio = Real(4.0, Attr(Place("", ("mlp_ratio",))), None)
    >>> str((ratio * 8).expr), Whole(ratio * 8).expr.symbol
    ('(mlp_ratio * 8)', '//')
    """

    def __new__(cls, value: float, expr: Expr, listener: Listener | None) -> Real:
        self = super().__new__(cls, value)
        self.expr = expr
        self.listener = listener
        return self

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)

    def __hash__(self) -> int:
        return float.__hash__(self)

    def __floor__(self) -> Size:
        return Size(int(float(self) // 1), Op("//", self.expr, Lit(1)), self.listener)

    def __ceil__(self) -> Size:
        return Size(-int(-float(self) // 1), Op("ceil", self.expr, Lit(1)), self.listener)

    def __round__(self, digits: Any = None) -> Any:
        if digits is not None:
            return round(float(self), digits)
        return Size(round(float(self)), Op("round", self.expr, Lit(1)), self.listener)


def _arithmetic(symbol: str, swapped: bool) -> Callable[[Real, Any], Any]:
    def method(self: Real, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        theirs = plain(other) if isinstance(other, int) else float(other)
        left, right = (theirs, float(self)) if swapped else (float(self), theirs)
        first, second = (other, self) if swapped else (self, other)
        return Real(ARITHMETIC[symbol](left, right), Op(symbol, expr_of(first), expr_of(second)), self.listener)

    return method


def _comparison(symbol: str) -> Callable[[Real, Any], Any]:
    def method(self: Real, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        outcome = COMPARISONS[symbol](float(self), plain(other) if isinstance(other, int) else float(other))
        if self.listener is not None:
            self.listener.on_comparison(symbol, self.expr, expr_of(other), outcome)
        return outcome

    return method


_NAMES = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow"}
for _symbol, _name in _NAMES.items():
    setattr(Real, f"__{_name}__", _arithmetic(_symbol, swapped=False))
    setattr(Real, f"__r{_name}__", _arithmetic(_symbol, swapped=True))
for _symbol, _name in DUNDER.items():
    setattr(Real, _name, _comparison(_symbol))


class _Kind(type):
    """Makes `Whole` pass for `int`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, int)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, int)

    def __call__(cls, value: Any = 0, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, Size) and not args:
            return value
        if isinstance(value, Real) and not args:
            return value.__floor__() if value >= 0 else int(value)
        return int(value, *args, **kwargs)


class Whole(int, metaclass=_Kind):
    """What `int` is called for in code that is followed: a number made whole remembers what it was.

    >>> Whole("7"), Whole(7.9), isinstance(7, Whole), issubclass(bool, Whole)
    (7, 7, True, True)
    """


__all__ = ["Real", "Whole"]
