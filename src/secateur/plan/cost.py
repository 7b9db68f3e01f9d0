"""What any choice costs, without a second run."""

from __future__ import annotations

from secateur.axes import Polynomial
from secateur.trace.graph import Graph


class CostModel:
    """MACs, parameters and bytes of a graph's model for any counts of its axes."""

    def __init__(self, graph: Graph) -> None:
        tensors = {id(t): (n, t) for n, t in reversed(list(graph.model.named_parameters()))}
        self.macs = Polynomial([(cost.factor, cost.layouts) for cost in graph.costs])
        self.params = Polynomial([(1, graph.layouts[name]) for name, _ in tensors.values()])
        self.bytes = Polynomial([(t.element_size(), graph.layouts[name]) for name, t in tensors.values()])
