"""What a ratio means where several axes make up one dimension.

The width of an attention is heads × dims, that of a grouped convolution groups × channels per group. Half of such a
dimension is half of one factor: half of both would leave a quarter. So of each product one factor is cut: whole heads
(with grouped queries, kv heads and all that goes with them), channels rather than groups. The others are cut only when
they are named. So are rotary pairs, in any case: each has a frequency of its own, which the model does not learn.
"""

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass

from secateur.axes import Atom, Concat, Layout, Product, resolve
from secateur.tracing.graph import Axis, Graph
from secateur.tracing.naming import GROUPS, HEADS, ROTARY, called

_Cover = frozenset[Atom]  # axes that together cut a layout once


def only_if_named(axis: Axis) -> bool:
    """Whether an axis is left alone by every target that does not name it."""
    return called(axis.atom) == ROTARY


def leading(graph: Graph, axes: Collection[Axis], named: Collection[Axis] = ()) -> set[Axis]:
    """The axes among some that are to be cut for every dimension to be cut once, as near as that comes.

    `named` are cut in any case, so dimensions that they are part of need no others.
    """
    free = frozenset(axis.atom for axis in axes if not only_if_named(axis))
    chosen = {axis.atom for axis in named}
    dims = [
        (len(shape), dim) for name, shape in graph.layouts.items() if graph.kinds[name] == "parameter" for dim in shape
    ]
    parts = [(rank, part) for rank, dim in dims for part in _parts(resolve(dim), free)]
    chosen |= {atom for rank, part in parts if rank > 1 and part.alone for atom in part.ways[0]}
    products = [part for rank, part in parts if rank > 1 and not part.alone]
    for part in sorted(products, key=lambda part: len(part.ways)):  # those with fewest ways have least choice
        if not any(way <= chosen for way in part.ways):
            spoilt = _elsewhere(products, chosen)
            chosen |= _best(part.ways, spoilt)
    inside = {atom for part in products for way in part.ways for atom in way}
    chosen |= {atom for rank, part in parts if rank == 1 for atom in part.ways[0] if atom not in inside}
    return {axis for axis in axes if axis.atom in chosen}


@dataclass(frozen=True)
class _Part:
    """A stretch of a dimension, and the ways to cut it: one factor of a product each, the outermost first."""

    ways: tuple[_Cover, ...]

    @property
    def alone(self) -> bool:
        return len(self.ways) == 1


def _parts(layout: Layout, free: Collection[Atom]) -> Iterator[_Part]:
    """The stretches of a layout that can be cut."""
    for part in layout.parts if isinstance(layout, Concat) else (layout,):
        if ways := tuple(way for factor in _factors(part) if (way := _whole(factor, free))):
            yield _Part(ways)


def _factors(layout: Layout) -> tuple[Layout, ...]:
    return layout.parts if isinstance(layout, Product) else (layout,)


def _whole(factor: Layout, free: Collection[Atom]) -> _Cover:
    """What cuts a factor: itself, or what cuts each part of a concatenation."""
    if isinstance(factor, Atom):
        return frozenset({factor} & free)  # type: ignore[operator]
    return frozenset(atom for part in _parts(factor, free) for atom in min(part.ways, key=_rank))


def _best(ways: Sequence[_Cover], spoilt: Set[Atom]) -> _Cover:
    """The way that people would choose, the outermost of several; one that cuts nothing twice, if there is."""
    return min(ways, key=lambda way: (bool(way & spoilt), _rank(way)))


def _rank(way: _Cover) -> int:
    """Heads first, groups last."""
    kinds = {called(atom) for atom in way}
    return 0 if kinds <= {*HEADS} else 2 if GROUPS in kinds else 1


def _elsewhere(products: Collection[_Part], chosen: Collection[Atom]) -> set[Atom]:
    """What would cut a product for the second time."""
    cut = [part for part in products if any(way <= chosen for way in part.ways)]  # type: ignore[operator]
    return {atom for part in cut for way in part.ways for atom in way}


__all__ = ["leading", "only_if_named"]
