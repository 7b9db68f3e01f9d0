"""`secateur inspect`: what can be cut, and what cannot."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from secateur.cli.arguments import Traced, add_model, checked_early, traced
from secateur.cli.exits import Exit
from secateur.cli.screen import Screen, count, table
from secateur.planning.problem import CostModel
from secateur.tracing import Blocked

HELP = "show what can be cut in a model, what each axis carries, what is blocked and by which line of code"
add_arguments = add_model  # and nothing else


def run(args: argparse.Namespace, screen: Screen) -> Exit:
    """Trace a model and show its axes."""
    checked_early(args)
    with screen.steps(2) as steps:
        found = traced(args, screen, steps.begin, weights=False)
    data = _data(found)
    screen.data(data)
    screen.show(_headline(data), "", _axes_table(data["axes"]), "", _blocked_table(found.graph.blocked))
    if found.graph.unseen:
        screen.show("", table(("no run showed", "where"), [(each.what, each.where) for each in found.graph.unseen]))
    if found.graph.unknown:
        screen.show("", f"ops without a rule, which block what they touch: {', '.join(found.graph.unknown)}")
    return Exit.DONE


def _headline(data: Mapping[str, Any]) -> str:
    return (
        f"{data['model']} ({data['class']}): {count(data['macs'])} MACs, {count(data['params'])} parameters; "
        f"{len(data['axes'])} axes touch {data['touched']:.1%} of the parameters"
    )


def _axes_table(axes: Sequence[Mapping[str, Any]]) -> Any:
    """Every axis: its size, what depends on it, whether cutting it is exact."""
    columns = ("axis", "size", "sites", "MACs", "parameters", "exact, or why not")
    rows = []
    for axis in axes:
        costs = (count(axis["macs"]), count(axis["params"]))
        rows.append((axis["name"], f"{axis['size']:,}", f"{len(axis['sites']):,}", *costs, axis["why"] or "exact"))
    return table(columns, rows, numbers=columns[1:5])


def reasons(blocked: Sequence[Blocked]) -> dict[str, list[Blocked]]:
    """What is blocked, by reason, the most frequent first."""
    groups: dict[str, list[Blocked]] = {}
    for item in blocked:
        groups.setdefault(item.reason, []).append(item)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _blocked_table(blocked: Sequence[Blocked]) -> Any:
    """What cannot be cut, by reason, with a few of the dimensions."""
    rows = []
    for reason, items in reasons(blocked).items():
        some = ", ".join(f"{item.tensor}[{item.dim}]" for item in items[:3])
        rows.append((f"{len(items):,}", reason, some + (", …" if len(items) > 3 else "")))
    return table(("blocked", "because", "where"), rows, numbers=("blocked",))


def _data(found: Traced) -> dict[str, Any]:
    graph, cost = found.graph, CostModel.of(found.graph)
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
                "macs": cost.macs.saved(axis.atom, 0),  # all that depends on it
                "params": cost.params.saved(axis.atom, 0),
                "exact": axis.exact,
                "why": axis.why,
                "sites": [asdict(site) for site in axis.sites],
            }
            for axis in graph.axes
        ],
        "blocked": [asdict(item) for item in graph.blocked],
        "unseen": [asdict(item) for item in graph.unseen],
        "unknown_ops": dict(graph.unknown),
    }
