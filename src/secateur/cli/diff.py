"""`secateur diff`: what two plans, or two saved models, differ in."""

import argparse
from pathlib import Path
from typing import Any

import torch

from secateur.cli.exits import Exit, InputError
from secateur.cli.saved import COSTS, Saved, read
from secateur.cli.screen import Screen, table
from secateur.planning import Plan
from secateur.planning.plans import Difference, difference

HELP = "show what two plans, or two saved models, differ in; exits with 1 if they do"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("first", type=Path, metavar="A", help="a saved model or a plan")
    parser.add_argument("second", type=Path, metavar="B", help="another")


def run(args: argparse.Namespace, screen: Screen) -> Exit:
    """Compare two files."""
    first, second = read(args.first), read(args.second)
    plans = (_plan(first), _plan(second))
    found = difference(*plans)
    weights = _weights(first, second)
    classes = [saved.class_name for saved in (first, second) if saved.class_name is not None]
    same = not found and not weights and len(set(classes)) <= 1
    screen.data({"same": same, "classes": classes, **found.to_data(), "weights": weights})
    if same:
        screen.show("no difference")
    else:
        screen.show(f"A  {first.path}", f"B  {second.path}")
        if len(set(classes)) > 1:
            screen.show(f"A is a {classes[0]}, B a {classes[1]}")
        _show(screen, found, plans, weights)
    return Exit.DONE if same else Exit.DIFFERENT


def _plan(saved: Saved) -> Plan:
    """The plan of a file; an empty one for a model that was never cut."""
    if saved.plan is not None:
        return saved.plan
    if saved.class_name is None:
        raise InputError(f"{saved.path} holds weights without a plan; compare what prune or save wrote")
    return Plan(axes=(), kept={}, shapes={}, attributes=())


def _weights(first: Saved, second: Saved) -> list[str]:
    """The names of tensors that differ, where both files hold a model."""
    ours, theirs = first.tensors, second.tensors
    if ours is None or theirs is None:
        return []

    def equal(name: str) -> bool:
        same_form = ours.get(name) == theirs.get(name)
        return same_form and torch.equal(
            *(saved.tensor(name).reshape(-1).view(torch.uint8) for saved in (first, second))
        )

    return [name for name in sorted({*ours, *theirs}) if not equal(name)]


def _show(screen: Screen, found: Difference, plans: tuple[Plan, Plan], weights: list[str]) -> None:
    costs = [
        (what, *(say(getattr(plan, key).after) for plan in plans)) for key, what, say in COSTS if key in found.costs
    ]
    axes = [(a.name, f"{a.size:,}", _kept(a.first), _kept(a.second), f"{a.common:,}") for a in found.axes]
    attributes = [(name, _kept(a), _kept(b)) for name, a, b in found.attributes]
    for columns, rows in (
        (("after the cut", "A", "B"), costs),
        (("axis", "size", "kept by A", "kept by B", "by both"), axes),
        (("attribute", "A", "B"), attributes),
    ):
        if rows:
            screen.show("", table(columns, rows, numbers=columns[1:]))
    if found.tensors and not axes:
        screen.show("", f"other positions of {', '.join(found.tensors[:5])} ({len(found.tensors)} tensors)")
    if weights:
        screen.show("", f"other weights: {', '.join(weights[:5])} ({len(weights)} tensors)")


def _kept(number: Any) -> str:
    return "whole" if number is None else f"{number:,}"
