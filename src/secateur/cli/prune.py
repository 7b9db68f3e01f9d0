"""`secateur prune`: trace, plan, cut, verify, write; and for a target that cannot be reached, what is in its way."""

import argparse
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from secateur import onnx
from secateur.axes import Atom, Layout, Polynomial
from secateur.cli import pretrained, report
from secateur.cli.arguments import Traced, add_choice, add_model, batches, checked_early, options, traced, use_data
from secateur.cli.exits import Exit, UsageError
from secateur.cli.folder import Folder, made_inside
from secateur.cli.models import name_of
from secateur.cli.packages import optional
from secateur.cli.saved import costs_table, plan_data
from secateur.cli.screen import Screen, size
from secateur.cli.text import is_text, perplexity
from secateur.compensate import LeastSquares
from secateur.errors import PlanError
from secateur.io import save
from secateur.pipeline.apply import apply
from secateur.planning import Macs, Params, Plan, Ratio, plan
from secateur.planning.problem import PruningProblem
from secateur.planning.reasons import blocked
from secateur.planning.targets import Bytes, Target
from secateur.timing import Latency
from secateur.tracing import Graph

HELP = "cut a model to a target, prove the cut right, write the small model"
MODEL, PLAN, ONNX = "model.safetensors", "plan.json", "model.onnx"
NAMES = (MODEL, PLAN, ONNX, f"{ONNX}.data", *report.NAMES, *pretrained.NAMES)
TARGETS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "macs": (Macs, "keep at most this part of the multiply-accumulates, or so many: 0.5, 500M"),
    "params": (Params, "keep at most this part of the parameters, or so many: 0.5, 20M"),
    "bytes": (Bytes, "keep at most this part of the weights' bytes, or so many: 0.5, 20MB"),
    "latency": (Latency, "keep at most this part of the run time, as measured here, or so much: 0.5, 8ms"),
    "ratio": (Ratio, "remove this fraction of every dimension; the others can be given together"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_model(parser)
    for name, (_, text) in TARGETS.items():
        parser.add_argument(f"--{name}", metavar="FRACTION" if name == "ratio" else "AMOUNT", help=text)
    add_choice(parser)
    parser.add_argument("--loadable", action="store_true", help="cut only to what the model's own library can load")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the results go (default: the model's name)")
    parser.add_argument("--onnx", action="store_true", help="write ONNX too, checked in onnxruntime against torch")
    parser.add_argument("--dynamic", action="store_true", help="let the ONNX model take any batch size and length")
    parser.add_argument("--report", action="store_true", help="write a page and a picture that show what happened")
    parser.add_argument("--force", action="store_true", help="replace results that are there already")


def run(args: argparse.Namespace, screen: Screen) -> Exit:
    """Cut a model and write what came out."""
    kind, target = _target(args)
    use_data(args)
    keywords = options(args)
    compensation = LeastSquares(batches(args, "--compensate")) if args.compensate else None
    folder = Folder(args.out or Path(f"{name_of(args.model)}-pruned"), NAMES, args.force)
    checked_early(args, folder)
    if args.dynamic and not args.onnx:
        raise UsageError("--dynamic is about the ONNX model; give it with --onnx")
    for package in ("onnx", "onnxscript", "onnxruntime") if args.onnx else ():
        optional(package, "--onnx")
    with screen.steps(5 + args.onnx + args.report) as steps:
        found = traced(args, screen, steps.begin, weights=True)
        if args.dynamic and not found.graph.others:
            raise UsageError(f"--dynamic: {found.name} takes no other sizes of its inputs (secateur inspect says why)")
        if found.files is not None:
            _check_large(args, folder)
        steps.begin("planning")
        with steps.aside():
            decided = _planned(found, kind, target, keywords, args.loadable)
        if args.report:
            story = report.story(found.graph, decided, model=found.name, importance=keywords["importance"])
        steps.begin("cutting and verifying")
        reads = [] if not is_text(args.data) else [perplexity(args.data, args.model, found.model)]
        if found.files is None:
            with steps.aside():
                small = apply(found.model, decided, compensate=compensation)
        with folder.filled(need=decided.bytes.after) as new:
            if found.files is not None:
                with steps.aside(), made_inside(new) as place:
                    small, _ = found.files.cut(decided, place, compensation)
            reads += [] if not reads else [perplexity(args.data, args.model, small)]
            steps.begin("saving")
            if found.files is not None:
                pass  # they are there
            elif args.loadable:
                pretrained.write(small, Path(args.model.partition(":")[2]), new / MODEL)
            else:
                save(small, new / MODEL)
            (new / PLAN).write_text(decided.to_json() + "\n", encoding="utf-8")
            off = None
            if args.onnx:
                steps.begin("exporting to ONNX")
                off = onnx.export(small, found.example, new / ONNX, others=found.graph.others if args.dynamic else ())
            if args.report:
                steps.begin("writing the report")
                report.write(story, new)
            files = {file.name: file.stat().st_size for file in sorted(new.iterdir())}
    _show(screen, found, decided, folder, files, off)
    if reads:
        screen.note(f"perplexity on text that was not fitted: {reads[0]:.2f} → {reads[1]:.2f}")
    return Exit.DONE


def _check_large(args: argparse.Namespace, folder: Folder) -> None:
    """Refuse what does not go with a model that is too large for memory."""
    if args.onnx:
        raise UsageError(
            f"--onnx: {args.model} is too large for memory; export what comes out, if that is small enough"
        )
    folder.check_empty()


def _target(args: argparse.Namespace) -> tuple[str, Target]:
    """The target, all budgets of it, and what the first of them counts."""
    given = [name for name in TARGETS if getattr(args, name) is not None]
    if not given:
        raise UsageError(f"how small? Give one of {', '.join(f'--{name}' for name in TARGETS)}")
    if "ratio" in given and len(given) > 1:
        raise UsageError(f"--ratio decides by itself; give it without --{given[0]}")
    return given[0], functools.reduce(operator.and_, (target_of(name, getattr(args, name)) for name in given))


def target_of(name: str, text: str) -> Any:
    """The target that an option says with a number, or with a number and a unit.

    >>> target_of("params", "20M"), target_of("macs", "0.5")
    (Params('20M'), Macs(0.5))
    """
    try:
        given: float | str = float(text)
    except ValueError:
        given = text
    try:
        return TARGETS[name][0](given)
    except PlanError as error:
        raise UsageError(f"--{name}: {error}") from error


def _planned(found: Traced, kind: str, target: Target, keywords: dict[str, Any], loadable: bool) -> Plan:
    if not found.graph.axes:
        raise PlanError(blocked(found.graph, found.name))
    check_options(found.graph, keywords)
    with explained(found.graph, kind, keywords):
        return plan(found.graph, target, **keywords, loadable=loadable)


def _show(
    screen: Screen, found: Traced, decided: Plan, folder: Folder, files: dict[str, int], off: float | None
) -> None:
    told = {"model": found.name, "class": found.graph.source.name, "verified": True, **plan_data(decided)}
    if (timed := decided.confirmation) is not None:
        told["latency"] = {**asdict(timed.measured), "asked": timed.asked, "predicted": timed.predicted}
        if (verdict := timed.verdict()) is not None:
            screen.note(f"{verdict}: {timed}")
    screen.data({**told, "onnx_difference": off, "folder": str(folder.path), "files": files})
    done = f"{len(decided.axes)} of {len(found.graph.axes)} axes cut; verified against the full-size model"
    if off is not None:
        done += f"; ONNX agrees to {off:.0e}"
    screen.show(costs_table(decided, found.name), "", done, "")
    if timed is not None:
        screen.show(f"measured: {timed.measured}, asked for {timed.asked:.1%}", "")
    screen.show(*(f"{folder.path / name}  {size(number)}" for name, number in files.items()))


def check_options(graph: Graph, keywords: Mapping[str, Any]) -> None:
    """Refuse options that do not fit the model, such as names of layers that it does not have."""
    try:
        PruningProblem(graph, **keywords)
    except PlanError as error:
        raise UsageError(str(error)) from error


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
    problem = PruningProblem(graph, **options)
    counts = {axis.atom: n for axis, n in problem.counts(lambda _: 1.0).items()}
    left = {module: cost(counts) for module, cost in _by_module(graph, kind).items()}
    whole = sum(left.values()) or 1
    most = sorted(left, key=lambda module: -left[module])[:3]
    parts = [f"{module or 'the model'} {left[module] / whole:.0%}{_why(graph, module, counts)}" for module in most]
    return f"most of what stays is in {', '.join(parts)}"


def _by_module(graph: Graph, kind: str) -> dict[str, Polynomial]:
    """What each module costs, in parameters if that is what counts, else in MACs."""
    parts: Iterable[tuple[str, int, Sequence[Layout]]]
    if kind == "params":
        names = [name for name, _ in graph.model.named_parameters() if name in graph.layouts]
        parts = ((name.rpartition(".")[0], 1, graph.layouts[name]) for name in names)
    else:
        parts = ((cost.module, 1, cost.layouts) for cost in graph.costs)
    terms: dict[str, list[tuple[int, Sequence[Layout]]]] = {}
    for module, factor, layouts in parts:
        terms.setdefault(module, []).append((factor, layouts))
    return {module: Polynomial(found) for module, found in terms.items()}


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
