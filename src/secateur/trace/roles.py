"""Who makes and who reads the positions of an axis: what is needed to tell which of them contribute nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from secateur.axes import Atom, Layout, free_atoms
from secateur.trace.graph import Graph, Site
from secateur.trace.tracer import Use


class Roles:
    """What the traced run did with data, seen from the model's tensors.

    `reads` are the sites that a product with data sums over, `makes` those that are there in a result that data has
    part in. An axis is in `mixed` when something besides reading weights looks at its positions: data summed with
    data, a reduction, an op that is seen as a whole.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._origin = {id(dim): Site(name, i) for name, dims in graph.own_dims.items() for i, dim in enumerate(dims)}
        self.reads: set[Site] = set()
        self.makes: set[Site] = set()
        self.mixed: set[Atom] = set()
        for use in graph.uses:
            self._follow(use)

    def _follow(self, use: Use) -> None:
        made = {atom for dims in use.made for dim in dims for atom in free_atoms(dim)}
        summed = {atom for layout, _ in use.summed for atom in free_atoms(layout)}
        for layout, names in use.summed:
            if names is None:
                self.mixed.update(free_atoms(layout))
            else:
                self.reads.update(self._sites(layout, names))
        gone = {id(layout) for layout, _ in use.summed}
        for dims, names in use.given:
            for dim in dims:
                there = set(free_atoms(dim))
                if names is None:
                    self.mixed.update(there - made - summed)
                elif id(dim) not in gone and there & made:
                    self.makes.update(self._sites(dim, names))

    def _sites(self, layout: Layout, names: Iterable[str]) -> Iterator[Site]:
        """The dimension that a layout belonged to from the start; where that is lost, all that it could be."""
        if id(layout) in self._origin:
            yield self._origin[id(layout)]
            return
        wanted = set(free_atoms(layout))
        for name in names:
            for i, dim in enumerate(self._graph.layouts[name]):
                if wanted & set(free_atoms(dim)):
                    yield Site(name, i)


def roles(graph: Graph) -> Roles:
    """Go once through everything that the traced run did with data."""
    return Roles(graph)
