"""`secateur show`: what is in a file."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from secateur.cli.exits import Exit
from secateur.cli.saved import Saved, costs_table, plan_data, read
from secateur.cli.screen import Screen, count, size, table
from secateur.plan import Plan

HELP = "show what is in a saved model or a plan"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a .safetensors file, or a plan as JSON")


def run(args: argparse.Namespace, screen: Screen) -> Exit:
    """Show a file."""
    saved = read(args.file)
    screen.data(_data(saved))
    screen.show(_headline(saved))
    if saved.plan is not None:
        screen.show("", costs_table(saved.plan), "", _axes_table(saved.plan))
        if saved.plan.attributes:
            screen.show("", _attributes_table(saved.plan))
    elif saved.tensors is not None:
        screen.show("", _tensors_table(saved))
    return Exit.DONE


def _headline(saved: Saved) -> str:
    if saved.tensors is None:
        return f"{saved.path}: a plan"
    held = f"{len(saved.tensors)} tensors, {count(_elements(saved))} numbers, {size(saved.path.stat().st_size)}"
    if saved.class_name is None:
        return f"{saved.path}: weights without a plan, {held}"
    what = "never cut" if saved.plan is None else f"cut on {len(saved.plan.axes)} axes"
    return f"{saved.path}: a {saved.class_name}, {what}, {held}"


def _elements(saved: Saved) -> int:
    return sum(math.prod(shape) for _, shape in (saved.tensors or {}).values())


def _axes_table(plan: Plan) -> Any:
    rows = [
        (axis.name, f"{axis.size:,}", f"{len(axis.keep):,}", "exact" if axis.exact else "not exact")
        for axis in plan.axes
    ]
    return table(("axis", "before", "after", ""), rows, numbers=("before", "after"))


def _attributes_table(plan: Plan) -> Any:
    rows = [(str(place), f"{was:,}", f"{value:,}") for place, was, value in plan.attributes]
    return table(("attribute", "before", "after"), rows, numbers=("before", "after"))


def _tensors_table(saved: Saved) -> Any:
    rows = [(name, "×".join(map(str, shape)), dtype) for name, (dtype, shape) in (saved.tensors or {}).items()]
    return table(("tensor", "shape", "dtype"), rows)


def _data(saved: Saved) -> dict[str, Any]:
    return {
        "file": str(saved.path),
        "kind": "plan" if saved.tensors is None else "model" if saved.class_name else "weights",
        "class": saved.class_name,
        "plan": None if saved.plan is None else plan_data(saved.plan),
        "tensors": None
        if saved.tensors is None
        else {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in saved.tensors.items()},
        "tied": {name: list(others) for name, others in saved.tied.items()},
    }
