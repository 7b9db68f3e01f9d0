"""Who makes and who reads the positions of an axis: what is needed to tell which of them contribute nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from secateur.axes import Atom, Layout, free_atoms
from secateur.trace.graph import Graph, Site
from secateur.trace.tracer import Use


@dataclass
class Roles:
    """Sites whose dimension is summed over with data (`reads`), or stays in a result that data has part in (`makes`).

    An axis is in `mixed` when something besides the reading weights looks at its positions: data summed with data, a
    reduction, an op that is seen as a whole.
    """

    reads: set[Site] = field(default_factory=set)
    makes: set[Site] = field(default_factory=set)
    mixed: set[Atom] = field(default_factory=set)


def roles(graph: Graph) -> Roles:
    """Go once through everything that the traced run did with data."""
    found = Roles()
    origin = {id(dim): Site(name, i) for name, dims in graph.own_dims.items() for i, dim in enumerate(dims)}

    def sites(layout: Layout, names: Iterable[str]) -> Iterator[Site]:
        """The dimension that a layout belonged to from the start; where that is lost, all that it could be."""
        if id(layout) in origin:
            yield origin[id(layout)]
            return
        wanted = set(free_atoms(layout))
        for name in names:
            for i, dim in enumerate(graph.layouts[name]):
                if wanted & set(free_atoms(dim)):
                    yield Site(name, i)

    for use in graph.uses:
        _follow(use, found, sites)
    return found


def _follow(use: Use, found: Roles, sites: object) -> None:
    assert callable(sites)
    made = {atom for dims in use.made for dim in dims for atom in free_atoms(dim)}
    summed: set[Atom] = set()
    gone = {id(layout) for layout, _ in use.summed}
    for layout, names in use.summed:
        summed.update(free_atoms(layout))
        if names is None:
            found.mixed.update(free_atoms(layout))
        else:
            found.reads.update(sites(layout, names))
    for dims, names in use.given:
        for dim in dims:
            there = set(free_atoms(dim))
            if names is None:
                found.mixed.update(there - made - summed)
            elif id(dim) not in gone and there & made:
                found.makes.update(sites(dim, names))
