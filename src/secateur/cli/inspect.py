"""`secateur inspect`: what can be cut, and what cannot."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from secateur.cli.arguments import Traced, add_model, checked_early, traced
from secateur.cli.exits import Exit
from secateur.cli.screen import Screen, count, table
from secateur.plan.cost import CostModel
from secateur.trace import Blocked, Graph

HELP = "show what can be cut in a model, what each axis carries, what is blocked and by which line of code"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_model(parser)


def run(args: argparse.Namespace, screen: Screen) -> Exit:
    """Trace a model and show its axes."""
    checked_early(args)
    with screen.steps(2) as steps:
        found = traced(args, screen, steps.begin, weights=False)
    screen.data(_data(found))
    axes, blocked = axes_table(found.graph), blocked_table(found.graph.blocked)
    screen.show(_headline(found), "", axes, "", blocked)
    if found.graph.unknown:
        screen.show("", f"ops without a rule, which block what they touch: {', '.join(found.graph.unknown)}")
    return Exit.DONE


def _headline(found: Traced) -> str:
    graph, cost = found.graph, CostModel(found.graph)
    return (
        f"{found.name} ({type(graph.model).__name__}): {count(cost.macs({}))} MACs, "
        f"{count(cost.params({}))} parameters; {len(graph.axes)} axes touch {graph.touched():.1%} of the parameters"
    )


def _carried(graph: Graph) -> list[tuple[int, int]]:
    """For each axis, the MACs and parameters that would be gone without it."""
    cost = CostModel(graph)
    return [(cost.macs.saved(axis.atom, 0), cost.params.saved(axis.atom, 0)) for axis in graph.axes]


def axes_table(graph: Graph) -> Any:
    """Every axis: its size, what it carries, whether cutting it is exact."""
    rows = [
        (axis.name, f"{axis.size:,}", f"{len(axis.sites):,}", count(macs), count(params), axis.why or "exact")
        for axis, (macs, params) in zip(graph.axes, _carried(graph), strict=True)
    ]
    columns = ("axis", "size", "sites", "MACs", "parameters", "exact, or why not")
    return table(columns, rows, numbers=columns[1:5])


def reasons(blocked: Sequence[Blocked]) -> dict[str, list[Blocked]]:
    """What is blocked, by reason, the most frequent first."""
    groups: dict[str, list[Blocked]] = {}
    for item in blocked:
        groups.setdefault(item.reason, []).append(item)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def blocked_table(blocked: Sequence[Blocked]) -> Any:
    """What cannot be cut, by reason, with a few of the dimensions."""
    rows = []
    for reason, items in reasons(blocked).items():
        some = ", ".join(f"{item.tensor}[{item.dim}]" for item in items[:3])
        rows.append((f"{len(items):,}", reason, some + (", …" if len(items) > 3 else "")))
    return table(("blocked", "because", "where"), rows, numbers=("blocked",))


def _data(found: Traced) -> dict[str, Any]:
    graph, cost = found.graph, CostModel(found.graph)
    return {
        "model": found.name,
        "class": type(graph.model).__name__,
        "macs": cost.macs({}),
        "params": cost.params({}),
        "bytes": cost.bytes({}),
        "touched": graph.touched(),
        "axes": [
            {
                "name": axis.name,
                "size": axis.size,
                "macs": macs,
                "params": params,
                "exact": axis.exact,
                "why": axis.why,
                "sites": [{"tensor": site.tensor, "dim": site.dim} for site in axis.sites],
            }
            for axis, (macs, params) in zip(graph.axes, _carried(graph), strict=True)
        ],
        "blocked": [{"tensor": item.tensor, "dim": item.dim, "reason": item.reason} for item in graph.blocked],
        "unknown_ops": dict(graph.unknown),
    }
