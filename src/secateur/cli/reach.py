"""A target that cannot be reached: what the lowest is made of, and why that cannot go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from secateur.axes import Atom, Polynomial
from secateur.errors import PlanError
from secateur.plan.problem import Problem
from secateur.trace import Graph


@contextmanager
def explained(graph: Graph, kind: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Where a budget cannot be reached, say what is in the way of it."""
    try:
        yield
    except PlanError as error:
        if "cannot be reached" not in str(error):
            raise
        said = str(error).partition(". print(graph)")[0]
        raise PlanError(f"{said}; {what_blocks(graph, kind, options)}") from error


def what_blocks(graph: Graph, kind: str, options: Mapping[str, Any]) -> str:
    """The layers that most of the lowest cost is in, each with a reason; one sentence."""
    problem = Problem(graph, **options)
    counts = {axis.atom: n for axis, n in problem.counts(lambda _: 1.0).items()}
    costs = _params(graph) if kind == "params" else _macs(graph)
    left = {module: cost(counts) for module, cost in costs.items()}
    whole = sum(left.values()) or 1
    most = sorted(left, key=lambda module: -left[module])[:3]
    parts = [f"{module or 'the model'} {left[module] / whole:.0%}{_why(graph, module, counts)}" for module in most]
    return f"most of what stays is in {', '.join(parts)}"


def _macs(graph: Graph) -> dict[str, Polynomial]:
    modules = dict.fromkeys(cost.module for cost in graph.costs)
    return {
        module: Polynomial([(cost.factor, cost.layouts) for cost in graph.costs if cost.module == module])
        for module in modules
    }


def _params(graph: Graph) -> dict[str, Polynomial]:
    owners: dict[str, list[str]] = {}
    for name, _ in graph.model.named_parameters():
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        module: Polynomial([(1, graph.layouts[name]) for name in names if name in graph.layouts])
        for module, names in owners.items()
    }


def _why(graph: Graph, module: str, counts: Mapping[Atom, int]) -> str:
    """The first reason for which a layer's own tensors cannot be cut further."""
    for item in graph.blocked:
        if item.tensor.rpartition(".")[0] == module:
            return f" ({item.tensor}[{item.dim}]: {item.reason})"
    for axis in graph.axes:
        mine = any(site.tensor.rpartition(".")[0] == module for site in axis.sites)
        if mine and counts.get(axis.atom, axis.size) == axis.size > 1:
            return f" ({axis.name}: {'protected' if axis.exact else 'protected, or not exact'})"
    return ""
