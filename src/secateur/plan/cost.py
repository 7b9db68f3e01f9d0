"""What any choice costs, without a second run: each op's cost is a product of the sizes of its layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping

from secateur.axes import Atom, Layout, constant, resolve, size_after
from secateur.trace.graph import Graph

Counts = Mapping[Atom, int]


class CostModel:
    """MACs, parameters and bytes of a graph's model for any counts of its axes."""

    def __init__(self, graph: Graph) -> None:
        self._macs = _terms([(cost.factor, cost.layouts) for cost in graph.costs])
        tensors = {id(t): (n, t) for n, t in reversed(list(graph.model.named_parameters()))}
        self._params = _terms([(1, graph.layouts[name]) for name, _ in tensors.values()])
        self._bytes = _terms([(t.element_size(), graph.layouts[name]) for name, t in tensors.values()])

    def macs(self, counts: Counts) -> int:
        return _total(self._macs, counts)

    def params(self, counts: Counts) -> int:
        return _total(self._params, counts)

    def bytes(self, counts: Counts) -> int:
        return _total(self._bytes, counts)


def _terms(costs: list[tuple[int, tuple[Layout, ...]]]) -> list[tuple[int, tuple[Layout, ...]]]:
    """Constant factors multiplied out, equal terms added up: what is left is what a choice can change."""
    merged: dict[tuple[int, ...], tuple[int, tuple[Layout, ...]]] = {}
    for factor, layouts in costs:
        open_: list[Layout] = []
        for layout in map(resolve, layouts):
            if constant(layout):
                factor *= layout.size
            else:
                open_.append(layout)
        key = tuple(id(layout) for layout in open_)
        merged[key] = (merged.get(key, (0, ()))[0] + factor, tuple(open_))
    return list(merged.values())


def _total(terms: list[tuple[int, tuple[Layout, ...]]], counts: Counts) -> int:
    return sum(factor * math.prod(size_after(layout, counts) for layout in layouts) for factor, layouts in terms)
