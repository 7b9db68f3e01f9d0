"""`secateur sweep`: how much each axis matters, and what each target costs."""

import argparse
import functools
import json
import operator
from pathlib import Path
from typing import Any

from torch import nn

from secateur.cli import report
from secateur.cli.arguments import add_choice, add_model, batches, checked_early, options, traced
from secateur.cli.exits import Exit, UsageError
from secateur.cli.folder import Folder
from secateur.cli.packages import function
from secateur.cli.prune import TARGETS, check_options, explained, target_of
from secateur.cli.screen import Screen, table
from secateur.pipeline.sweep import RATIOS, Metric, OutputError, SweepResult, sweep
from secateur.planning import Ratio
from secateur.planning.targets import Target

HELP = "measure how sensitive a metric is to each axis, and the trade-off over ratios or budgets"
SWEEP = "sweep.json"
NAMES = (SWEEP, *report.NAMES)
_BUDGETS = tuple(name for name in TARGETS if name != "ratio")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_model(parser)
    parser.add_argument(
        "--eval",
        metavar="FILE.py:NAME",
        help="a function from a model to a number; without it, the change of the outputs, on --data or the example",
    )
    ratios = ",".join(map(str, RATIOS))
    parser.add_argument("--ratios", metavar="R,R,…", help=f"of the curve (default {ratios})")
    for name in _BUDGETS:
        parser.add_argument(f"--{name}", metavar="A,A,…", help=f"of the curve, instead: {TARGETS[name][1]}")
    parser.add_argument("--axis-ratio", type=float, default=0.5, metavar="R", help="of each axis alone (default 0.5)")
    parser.add_argument("--no-axes", action="store_true", help="the curve only, no axis alone")
    add_choice(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"write {SWEEP} here")
    parser.add_argument("--report", action="store_true", help="write a page and a picture too")
    parser.add_argument("--force", action="store_true", help="replace results that are there already")


def run(args: argparse.Namespace, screen: Screen) -> Exit:
    """Sweep and show what came out."""
    if args.loss and not args.eval:
        raise UsageError("batches for a loss are no examples to compare outputs on; give a metric with --eval")
    if args.loss and args.compensate:
        raise UsageError("batches for a loss are no examples to refit layers on; leave out --compensate")
    if args.report and args.out is None:
        raise UsageError("--report: say where it goes with --out DIR")
    kind, targets, keywords = *_targets(args), options(args)
    data = batches(args, "--compensate") if args.compensate else None
    folder = None if args.out is None else Folder(args.out, NAMES, args.force)
    checked_early(args, folder)
    with screen.steps(2) as steps:
        found = traced(args, screen, steps.begin, weights=True)
    metric, alone = _metric(args, found.model), None if args.no_axes else args.axis_ratio
    check_options(found.graph, keywords)
    with explained(found.graph, kind, keywords):
        made = sweep(found.model, found.example, metric, targets=targets, batches=data, axis_ratio=alone, **keywords)
    if folder is not None:
        with folder.filled() as new:
            (new / SWEEP).write_text(json.dumps(made.to_data(), indent=2) + "\n", encoding="utf-8")
            if args.report:
                report.write(report.story(found.graph, model=found.name, sweep=made), new)
    screen.data(made.to_data())
    _show(screen, made, folder)
    return Exit.DONE


def _targets(args: argparse.Namespace) -> tuple[str, list[Target]]:
    """The targets of the curve, and what the first budget of them counts."""
    given = [name for name in _BUDGETS if getattr(args, name) is not None]
    if given and args.ratios is not None:
        raise UsageError(f"--ratios decides by itself; give it without --{given[0]}")
    ratios = RATIOS if args.ratios is None else _numbers("ratios", args.ratios)
    if not all(0 < ratio < 1 for ratio in (*ratios, args.axis_ratio)):
        raise UsageError("--ratios and --axis-ratio are between 0 and 1")
    if not given:
        return "ratio", [Ratio(ratio) for ratio in sorted(set(ratios))]
    budgets = [[target_of(name, text) for text in getattr(args, name).split(",")] for name in given]
    if len({len(found) for found in budgets}) > 1:
        raise UsageError(f"{' and '.join(f'--{name}' for name in given)} hold together: give as many numbers to each")
    return given[0], [functools.reduce(operator.and_, together) for together in zip(*budgets, strict=True)]


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--{name} {text}: give numbers, as in 0.25,0.5,0.75") from None


def _metric(args: argparse.Namespace, model: nn.Module) -> Metric | None:
    if args.eval:
        made = function(args.eval, "--eval")
        made.__name__ = args.eval.rpartition(":")[2]
        return made
    if args.data and not args.compensate:
        return OutputError(model, batches(args, "a sweep"))
    return None


def _show(screen: Screen, made: SweepResult, folder: Folder | None) -> None:
    ratios = all(point.ratio is not None for point in made.curve)
    columns = ["ratio" if ratios else "target", "MACs left", "parameters left", made.metric]
    rows = [("0" if ratios else "", "100.0%", "100.0%", f"{made.whole:.4g}")]
    for p in made.curve:
        name = p.target if p.ratio is None else f"{p.ratio:g}"
        rows.append((name, f"{p.macs:.1%}", f"{p.params:.1%}", f"{p.metric:.4g}"))
    screen.show(table(columns, rows, numbers=columns))
    if made.axes:
        screen.show("", _axes_table(made))
    stuck = [item.axis for item in made.axes if item.point is None]
    if stuck:
        screen.show("", f"cannot be cut by themselves: {', '.join(stuck)}")
    if folder is not None:
        screen.show("", f"{folder.path / SWEEP}")


def _axes_table(made: SweepResult) -> Any:
    """Every axis that can be cut by itself, the one that matters most first."""
    moved = [(item, item.point) for item in made.axes if item.point is not None]
    moved.sort(key=lambda pair: -abs(pair[1].metric - made.whole))
    columns = ["axis alone", made.metric, "change", "MACs left", "cut along"]
    rows = [
        (item.axis, f"{p.metric:.4g}", f"{p.metric - made.whole:+.4g}", f"{p.macs:.1%}", ", ".join(item.along[:3]))
        for item, p in moved
    ]
    return table(columns, rows, numbers=columns[1:4])
