"""`secateur sweep`: how much each axis matters, and what each ratio costs."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

from torch import nn

from secateur.cli import report
from secateur.cli.arguments import Traced, add_choice, add_model, batches, checked_early, options, traced
from secateur.cli.exits import Exit, UsageError
from secateur.cli.folder import Folder
from secateur.cli.screen import Screen, table
from secateur.cli.script import function
from secateur.sweep import RATIOS, Metric, OutputError, Sweep, sweep

HELP = "measure how sensitive a metric is to each axis, and the trade-off over ratios"
SWEEP = "sweep.json"
NAMES = (SWEEP, *report.NAMES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_model(parser)
    parser.add_argument(
        "--eval",
        metavar="FILE.py:NAME",
        help="a function from a model to a number; without it, the change of the outputs, on --data or the example",
    )
    ratios = ",".join(map(str, RATIOS))
    parser.add_argument("--ratios", default=ratios, metavar="R,R,…", help=f"of the curve (default {ratios})")
    parser.add_argument("--axis-ratio", type=float, default=0.5, metavar="R", help="of each axis alone (default 0.5)")
    add_choice(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"write {SWEEP} here")
    parser.add_argument("--report", action="store_true", help="write a page and a picture too")
    parser.add_argument("--force", action="store_true", help="replace results that are there already")


def run(args: argparse.Namespace, screen: Screen) -> Exit:
    """Sweep and show what came out."""
    if args.loss and not args.eval:
        raise UsageError("batches for a loss are no examples to compare outputs on; give a metric with --eval")
    if args.report and args.out is None:
        raise UsageError("--report: say where it goes with --out DIR")
    ratios, keywords = _ratios(args), options(args)
    folder = None if args.out is None else Folder(args.out, NAMES, args.force)
    checked_early(args)
    if folder is not None:
        folder.check()
    if args.report:
        report.check()
    with screen.steps(2) as steps:
        found = traced(args, screen, steps.begin, weights=True)
    metric = _metric(args, found.model)
    made = sweep(found.model, found.example, metric, ratios=ratios, axis_ratio=args.axis_ratio, **keywords)
    if folder is not None:
        with folder.filled() as new:
            (new / SWEEP).write_text(json.dumps(made.to_data(), indent=2) + "\n", encoding="utf-8")
            if args.report:
                report.write(_story(found, made), new)
    screen.data(made.to_data())
    _show(screen, made, folder)
    return Exit.DONE


def _ratios(args: argparse.Namespace) -> tuple[float, ...]:
    try:
        ratios = tuple(float(part) for part in args.ratios.split(","))
    except ValueError:
        raise UsageError(f"--ratios {args.ratios}: give numbers, as in 0.25,0.5,0.75") from None
    if not all(0 < ratio < 1 for ratio in (*ratios, args.axis_ratio)):
        raise UsageError("--ratios and --axis-ratio are between 0 and 1")
    return tuple(sorted(set(ratios)))


def _metric(args: argparse.Namespace, model: nn.Module) -> Metric | None:
    if args.eval:
        made = function(args.eval, "--eval")
        made.__name__ = args.eval.rpartition(":")[2]
        return made
    if args.data:
        return OutputError(copy.deepcopy(model), batches(args, "a sweep"))
    return None


def _story(found: Traced, made: Sweep) -> Any:
    from secateur.report import Story

    return Story.of(found.graph, model=found.name, sweep=report.sweep_for_report(made))


def _show(screen: Screen, made: Sweep, folder: Folder | None) -> None:
    columns = ["ratio", "MACs left", "parameters left", made.metric]
    rows = [("0", "100.0%", "100.0%", f"{made.whole:.4g}")]
    rows += [(f"{p.ratio:g}", f"{p.macs:.1%}", f"{p.params:.1%}", f"{p.metric:.4g}") for p in made.curve]
    screen.show(table(columns, rows, numbers=columns), "", _axes_table(made))
    stuck = [item.axis for item in made.axes if item.point is None]
    if stuck:
        screen.show("", f"cannot be cut by themselves: {', '.join(stuck)}")
    if folder is not None:
        screen.show("", f"{folder.path / SWEEP}")


def _axes_table(made: Sweep) -> Any:
    """Every axis that can be cut by itself, the one that matters most first."""
    moved = [(item, item.point) for item in made.axes if item.point is not None]
    moved.sort(key=lambda pair: -abs(pair[1].metric - made.whole))
    columns = ["axis alone", made.metric, "change", "MACs left", "cut along"]
    rows = [
        (item.axis, f"{p.metric:.4g}", f"{p.metric - made.whole:+.4g}", f"{p.macs:.1%}", ", ".join(item.along[:3]))
        for item, p in moved
    ]
    return table(columns, rows, numbers=columns[1:4])
