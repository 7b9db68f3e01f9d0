"""Who makes and who reads the positions of an axis: what is needed to tell which of them contribute nothing."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from secateur.axes import Atom, Layout, free_atoms
from secateur.compat import OpOverload, is_pointwise
from secateur.ops.norm import NORMS, group_norm, layer_norm
from secateur.ops.pointwise import LINEAR_IN_ALL, LINEAR_IN_ONE, SCALES
from secateur.ops.record import record_of
from secateur.tracing.graph import Graph, Site
from secateur.tracing.tracer import Use


@dataclass(frozen=True)
class Roles:
    """What the traced run did with data, seen from the model's tensors."""

    reads: frozenset[Site]  # that a product with data sums over
    makes: frozenset[Site]  # that are there in a result that data has part in
    mixed: frozenset[Atom]  # looked at by more than reading weights: data summed with data, a reduction, a fused op


def roles(graph: Graph) -> Roles:
    """Go once through everything that the traced run did with data."""
    origin = {id(dim): Site(name, i) for name, dims in graph.own_dims for i, dim in enumerate(dims)}
    reads: set[Site] = set()
    makes: set[Site] = set()
    mixed: set[Atom] = set()
    free = cache(lambda layout: frozenset(free_atoms(layout)))  # most are those of many ops
    for use in graph.uses:
        made = {atom for dims in use.made for dim in dims for atom in free(dim)}
        summed = {atom for layout, _ in use.summed for atom in free(layout)}
        for layout, names in use.summed:
            if names is None:
                mixed |= free(layout)
            else:
                reads.update(_sites(graph, origin, layout, names))
        gone = {id(layout) for layout, _ in use.summed}
        for dims, names in use.given:
            for dim in dims:
                if names is None:
                    mixed |= free(dim) - made - summed
                elif id(dim) not in gone and free(dim) & made:
                    makes.update(_sites(graph, origin, dim, names))
    return Roles(frozenset(reads), frozenset(makes), frozenset(mixed))


def scaling(graph: Graph) -> Mapping[Atom, Mapping[str, str]]:
    """The vectors of a model that scale the positions of each axis, and in words what they are part of."""
    found: dict[Atom, dict[str, str]] = {}
    for use in graph.uses:
        how = _how(use.op)
        for (layout, *more), names in ((dims, names) for dims, names in use.given if how and dims and names):
            for name in names if not more else ():
                for atom in free_atoms(layout) if len(graph.layouts[name]) == 1 else ():
                    found.setdefault(atom, {})[name] = how
    return found


def _how(op: Any) -> str:
    """What an op does that scales positions, in words; nothing if it does not."""
    if not isinstance(op, OpOverload):
        return ""
    record = record_of(op)
    if record in (layer_norm, group_norm):
        return "it is part of a norm that takes away the mean over positions, which few rotations leave as it is"
    return "it is part of a norm" if record in NORMS else "it scales data" if op in SCALES else ""


def bent(graph: Graph, spared: Collection[str] = ()) -> frozenset[Atom]:
    """The axes each position of which goes through something by itself: ReLU, a scale, a batch of products.

    What vectors that are `spared` do does not count.
    """
    found: set[Atom] = set()
    free = cache(lambda layout: frozenset(free_atoms(layout)))
    for use in graph.uses:
        if not any(names is not None and not names.isdisjoint(spared) for _, names in use.given):
            made = {atom for dims in use.made for dim in dims for atom in free(dim)}
            found |= _bent(use, made - {atom for layout, _ in use.summed for atom in free(layout)}, free)
    return frozenset(found)


def _bent(use: Use, stay: set[Atom], free: Callable[[Layout], frozenset[Atom]]) -> set[Atom]:
    """The axes in which an op is not one linear map of all positions alike; not each op that is not is known."""
    if use.op in LINEAR_IN_ALL:
        return set()
    given = Counter(atom for dims, _ in use.given for atom in {a for dim in dims for a in free(dim)})
    if isinstance(use.op, OpOverload) and is_pointwise(use.op) and use.op not in LINEAR_IN_ONE:
        return set(given)
    data = {atom for dims, names in use.given if names is None for dim in dims for atom in free(dim)}
    return {atom for atom, n in given.items() if n > 1 and atom in stay & data}


def _sites(graph: Graph, origin: Mapping[int, Site], layout: Layout, names: Iterable[str]) -> Iterator[Site]:
    """The dimension that a layout belonged to from the start; where that is lost, all that it could be."""
    if id(layout) in origin:
        yield origin[id(layout)]
        return
    wanted = set(free_atoms(layout))
    for name in names:
        for i, dim in enumerate(graph.layouts[name]):
            if wanted & set(free_atoms(dim)):
                yield Site(name, i)
