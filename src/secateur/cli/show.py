"""`secateur show`: what is in a file."""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from secateur.cli.exits import Exit
from secateur.cli.saved import Saved, costs_table, plan_data, read
from secateur.cli.screen import Screen, count, size, table

HELP = "show what is in a saved model or a plan"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a .safetensors file, or a plan as JSON")


def run(args: argparse.Namespace, screen: Screen) -> Exit:
    """Show a file."""
    saved = read(args.file)
    screen.data(_data(saved))
    screen.show(_headline(saved))
    for made in _tables(saved):
        screen.show("", made)
    return Exit.DONE


def _headline(saved: Saved) -> str:
    if saved.tensors is None:
        return f"{saved.path}: a plan"
    numbers = sum(math.prod(shape) for _, shape in saved.tensors.values())
    held = f"{len(saved.tensors)} tensors, {count(numbers)} numbers, {size(saved.path.stat().st_size)}"
    if saved.class_name is None:
        return f"{saved.path}: weights without a plan, {held}"
    what = "never cut" if saved.plan is None else f"cut on {len(saved.plan.axes)} axes"
    return f"{saved.path}: a {saved.class_name}, {what}, {held}"


def _tables(saved: Saved) -> Iterator[Any]:
    """What a plan does; for a file that has none, its tensors."""
    numbers = ("before", "after")
    if saved.plan is not None:
        axes = [
            (a.name, f"{a.size:,}", f"{len(a.keep):,}", "exact" if a.exact else "not exact") for a in saved.plan.axes
        ]
        attributes = [(str(place), f"{was:,}", f"{value:,}") for place, was, value in saved.plan.attributes]
        yield costs_table(saved.plan)
        yield table(("axis", *numbers, ""), axes, numbers=numbers)
        if attributes:
            yield table(("attribute", *numbers), attributes, numbers=numbers)
    elif saved.tensors is not None:
        tensors = [(name, "×".join(map(str, shape)), dtype) for name, (dtype, shape) in saved.tensors.items()]
        yield table(("tensor", "shape", "dtype"), tensors)


def _data(saved: Saved) -> dict[str, Any]:
    tensors = (saved.tensors or {}).items()
    shapes = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in tensors}
    return {
        "file": str(saved.path),
        "kind": "plan" if saved.tensors is None else "model" if saved.class_name else "weights",
        "class": saved.class_name,
        "plan": None if saved.plan is None else plan_data(saved.plan),
        "tensors": None if saved.tensors is None else shapes,
        "tied": {name: list(others) for name, others in saved.tied.items()},
    }
