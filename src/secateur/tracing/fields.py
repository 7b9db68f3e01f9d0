"""Numbers of a constructor with which what is made of them comes out as it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from secateur.sizes.size import Attr, Expr, Op, evaluate
from secateur.state.held import Place, named_tensors
from secateur.tracing.constructor import Constructed, Maker, constructed, numbers_in

FieldValues = dict[Place, float]


def agreed(now: Mapping[Place, float], sites: Iterable[tuple[Expr, Any]], *, real: bool = False) -> FieldValues:
    """The fields that are not as they are now, if all expressions that they are part of are what they must be.

    `real`: one that is a whole number now (`mlp_ratio=3`) may be any other.

    >>> width, heads = Place("", ("width",)), Place("", ("heads",))
    >>> sites = [(Attr(width), 8), (Op("//", Attr(width), Attr(heads)), 4)]
    >>> {str(place): value for place, value in agreed({width: 16, heads: 4}, sites).items()}
    {'width': 8, 'heads': 2}
    """
    described = [(expr, fields, must) for expr, must in sites if (fields := _fields(expr))]
    found: FieldValues = {}
    for expr, fields, must in sorted(described, key=lambda site: len(site[1])):  # those of one field come first
        if len(unknown := [field for field in fields if field not in found]) == 1:
            found[unknown[0]] = _solved(expr, unknown[0], must, {**now, **found}, real)
    values = {**now, **found}
    while odd := {
        field
        for expr, fields, must in described
        for field in fields
        if values[field] != now[field] and evaluate(expr, {}, values.__getitem__) != must
    }:
        values |= {field: now[field] for field in odd}
    return {field: value for field, value in values.items() if value != now[field]}


def _fields(expr: Expr) -> frozenset[Place]:
    if isinstance(expr, Op):
        return _fields(expr.left) | _fields(expr.right)
    return frozenset((expr.place,)) if isinstance(expr, Attr) else frozenset()


def _solved(expr: Expr, field: Place, must: Any, values: FieldValues, real: bool) -> float:
    """The value of a field, a factor or a divisor of the rest, that makes an expression so large; else as it is."""
    before, old = evaluate(expr, {}, values.__getitem__), values[field]
    if not before or not must:
        return old
    near = (old * must / before, old * before / must)
    whole = isinstance(old, int)
    for value in (*(map(round, near) if whole else ()), *(near if real or not whole else ())):
        if value and evaluate(expr, {}, {**values, field: value}.__getitem__) == must:
            return value
    return old


def fitted(maker: Maker, model: nn.Module) -> Maker:
    """A maker with the numbers with which a model was built, if these can be told from it; else as it is.

    >>> built = nn.Linear(3, 5)
    >>> dict(fitted(Maker(nn.Linear, {"in_features": 4, "out_features": 8}), built).arguments)
    {'in_features': 3, 'out_features': 5}
    """
    mine = _shapes(model)
    first = maker
    for _ in range(_ROUNDS):
        try:
            theirs = _shapes(maker.build({}))
            if theirs == mine:
                return maker
            new = _counted(maker, mine, theirs) or agreed(
                maker.fields(), _sites(constructed(maker, model), model, mine), real=True
            )
        except Exception:  # any code of the library's may run here
            return first
        if not new:
            return first
        maker = Maker(maker.function, maker.changed(partial(_instead, new)))
    return first


def _instead(new: FieldValues, place: Place, value: Any) -> Any:
    return new.get(place, value)


_ROUNDS = 4
_FEW = 200  # a number of blocks is no larger


def makes(maker: Maker, model: nn.Module) -> bool:
    """Whether a maker makes a model, as far as shapes tell."""
    return _shapes(maker.build({})) == _shapes(model)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}


def _sites(made: Constructed, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[Expr, Any]]:
    for name, sizes in made.dims.items():
        if len(shapes.get(name, ())) == len(sizes):
            yield from ((sized.expr, size) for sized, size in zip(sizes, shapes[name], strict=True))
    held = numbers_in(model)
    yield from ((expr, held[place]) for place, expr in made.numbers.items() if place in held)


def _counted(maker: Maker, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> FieldValues:
    """Fields that say how often something is there, where that is not as often as it should be."""
    odd: float = len(mine.keys() ^ theirs.keys())
    found: FieldValues = {}
    for place, value in maker.fields().items():
        if odd and type(value) is int and 0 < value < _FEW:
            best = odd
            for step in (1, -1):
                count = value + step
                while count > 0 and (left := _left(maker, {**found, place: count}, mine)) < best:
                    best, found[place], count = left, count, count + step
            odd = best
    return found


def _left(maker: Maker, values: FieldValues, mine: Mapping[str, Any]) -> float:
    """How many tensors a model has that one with other values has not, or the other way round."""
    try:
        return len(mine.keys() ^ _shapes(maker.build(values)).keys())
    except Exception:  # a number that it does not take
        return math.inf


__all__ = ["agreed", "fitted", "makes"]
