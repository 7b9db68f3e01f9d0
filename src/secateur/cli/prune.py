"""`secateur prune`: trace, plan, cut, verify, write."""

from __future__ import annotations

import argparse
import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from secateur.apply import apply
from secateur.cli import report
from secateur.cli.arguments import Traced, add_choice, add_model, batches, checked_early, options, traced
from secateur.cli.exits import Exit, UsageError
from secateur.cli.folder import Folder
from secateur.cli.inspect import reasons
from secateur.cli.models import name_of
from secateur.cli.packages import optional
from secateur.cli.reach import explained
from secateur.cli.saved import costs_table, plan_data
from secateur.cli.screen import Screen, size
from secateur.compensate import LeastSquares
from secateur.errors import PlanError
from secateur.io import save
from secateur.latency import Latency
from secateur.plan import Macs, Params, Plan, Ratio, plan
from secateur.plan.targets import Bytes, Target

HELP = "cut a model to a target, prove the cut right, write the small model"
MODEL, PLAN, ONNX = "model.safetensors", "plan.json", "model.onnx"
NAMES = (MODEL, PLAN, ONNX, f"{ONNX}.data", *report.NAMES)
TARGETS: dict[str, tuple[Callable[[float], Any], str]] = {
    "macs": (Macs, "keep at most this fraction of the multiply-accumulates"),
    "params": (Params, "keep at most this fraction of the parameters"),
    "bytes": (Bytes, "keep at most this fraction of the weights' bytes"),
    "latency": (Latency, "keep at most this fraction of the run time, as measured here"),
    "ratio": (Ratio, "remove this fraction of every axis; the others can be given together"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_model(parser)
    for name, (_, text) in TARGETS.items():
        parser.add_argument(f"--{name}", type=float, metavar="FRACTION", help=text)
    add_choice(parser)
    parser.add_argument(
        "--compensate", action="store_true", help="let what stays take over for what goes, by least squares on --data"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the results go (default: the model's name)")
    parser.add_argument("--onnx", action="store_true", help="write ONNX too, checked in onnxruntime against torch")
    parser.add_argument("--report", action="store_true", help="write a page and a picture that show what happened")
    parser.add_argument("--force", action="store_true", help="replace results that are there already")


def run(args: argparse.Namespace, screen: Screen) -> Exit:
    """Cut a model and write what came out."""
    kind, target = _target(args)
    keywords = options(args)
    compensation = LeastSquares(batches(args, "--compensate")) if args.compensate else None
    folder = Folder(args.out or Path(f"{name_of(args.model)}-pruned"), NAMES, args.force)
    checked_early(args)
    folder.check()
    if args.onnx:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            optional(package, "--onnx")
    if args.report:
        report.check()
    with screen.steps(5 + args.onnx + args.report) as steps:
        found = traced(args, screen, steps.begin, weights=True)
        steps.begin("planning")
        with steps.aside():
            decided = _planned(found, kind, target, keywords)
        scores = _scores(found, keywords) if args.report else None
        steps.begin("cutting and verifying")
        with steps.aside():
            small = apply(found.model, decided, compensate=compensation)
        with folder.filled(need=decided.bytes.after) as new:
            steps.begin("saving")
            save(small, new / MODEL)
            (new / PLAN).write_text(decided.to_json() + "\n", encoding="utf-8")
            off = _onnx(small, found.example, new, steps.begin) if args.onnx else None
            if args.report:
                steps.begin("writing the report")
                report.write(_story(found, decided, scores), new)
            files = {file.name: file.stat().st_size for file in sorted(new.iterdir())}
    screen.data(_data(found, decided, folder, files, off))
    _show(screen, found, decided, folder, files, off)
    return Exit.DONE


def _target(args: argparse.Namespace) -> tuple[str, Target]:
    """The target, all budgets of it, and what the first of them counts."""
    given = [name for name in TARGETS if getattr(args, name) is not None]
    if not given:
        raise UsageError(f"how small? Give one of {', '.join(f'--{name}' for name in TARGETS)}")
    if "ratio" in given and len(given) > 1:
        raise UsageError(f"--ratio decides by itself; give it without --{given[0]}")
    targets = []
    for name in given:
        try:
            targets.append(TARGETS[name][0](getattr(args, name)))
        except PlanError as error:
            raise UsageError(f"--{name}: {error}") from error
    return given[0], functools.reduce(operator.and_, targets)


def _planned(found: Traced, kind: str, target: Target, keywords: dict[str, Any]) -> Plan:
    with explained(found.graph, kind, keywords):
        decided = plan(found.graph, target, **keywords)
    if not found.graph.axes:
        why = ", ".join(f"{len(items)} × {reason}" for reason, items in reasons(found.graph.blocked).items())
        raise PlanError(f"nothing in {found.name} can be cut: {why}")
    return decided


def _scores(found: Traced, keywords: dict[str, Any]) -> Any:
    from secateur.report import scores_of

    return scores_of(found.graph, keywords["importance"])


def _story(found: Traced, decided: Plan, scores: Any) -> Any:
    from secateur.report import Story

    return Story.of(found.graph, decided, model=found.name, scores=scores)


def _onnx(model: Any, example: Any, folder: Path, begin: Callable[[str], None]) -> float:
    from secateur.onnx import export

    begin("exporting to ONNX")
    return export(model, example, folder / ONNX)


def _data(found: Traced, decided: Plan, folder: Folder, files: dict[str, int], off: float | None) -> dict[str, Any]:
    return {
        "model": found.name,
        "class": type(found.graph.model).__name__,
        "verified": True,
        **plan_data(decided),
        "onnx_difference": off,
        "folder": str(folder.path),
        "files": files,
    }


def _show(
    screen: Screen, found: Traced, decided: Plan, folder: Folder, files: dict[str, int], off: float | None
) -> None:
    screen.show(costs_table(decided, found.name))
    done = f"{len(decided.axes)} of {len(found.graph.axes)} axes cut; verified against the full-size model"
    if off is not None:
        done += f"; ONNX agrees to {off:.0e}"
    screen.show("", done, "", *(f"{folder.path / name}  {size(number)}" for name, number in files.items()))
