"""`secateur demo`: train, cut and fine-tune two small networks on data that needs no download."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from secateur.cli import report
from secateur.cli.exits import Exit, UsageError
from secateur.cli.folder import Folder
from secateur.cli.packages import did_you_mean, optional
from secateur.cli.screen import Screen, count, size, table
from secateur.demo import DATA, DemoOutcome, RoundTrip, round_trips
from secateur.demo import run as run_demo
from secateur.errors import MissingPackageError
from secateur.importance import Magnitude
from secateur.io import save

HELP = "train two small classifiers, cut them to half, let them recover, and report"
_FOLDER = Path("secateur-demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--seed", type=int, default=0, help="of everything but the clock (default 0)")
    parser.add_argument("--data", default="digits", metavar="NAME", help=f"{' or '.join(DATA)} (default digits)")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"where results go (default {_FOLDER}, replaced)")
    parser.add_argument("--quick", action="store_true", help="train very little, to see that everything works")
    parser.add_argument("--force", action="store_true", help="replace results that are there already")


def run(args: argparse.Namespace, screen: Screen) -> Exit:
    """Run the demo and write its report."""
    if args.data not in DATA:
        raise UsageError(f"there is no data {args.data!r}{did_you_mean(args.data, DATA)} It is {' or '.join(DATA)}")
    if args.data == "digits":
        optional("sklearn", "the demo")
    report.check()
    names = tuple(f"{key}.{end}" for key in ("residual-net", "lstm") for end in ("safetensors", "json", "html", "png"))
    folder = Folder(args.out or _FOLDER, names, args.force or args.out is None)
    folder.check()
    outcomes = run_demo(args.seed, args.data, quick=args.quick)
    trips, note = _round_trips(args)
    with folder.filled() as new:
        for outcome in outcomes:
            _write(outcome, new, args)
    pages = [str(folder.path / f"{_key(outcome)}.html") for outcome in outcomes]
    networks = [{"name": o.name, "stages": [asdict(stage) for stage in o.stages]} for o in outcomes]
    told = {"seed": args.seed, "data": args.data, "networks": networks, "round_trips": [asdict(t) for t in trips]}
    screen.data({**told, "folder": str(folder.path), "reports": pages})
    screen.show(_table(outcomes), "", note, *map(_line, trips), "", "the reports:", *(f"  {page}" for page in pages))
    return Exit.DONE


def _round_trips(args: argparse.Namespace) -> tuple[tuple[RoundTrip, ...], str]:
    """A model of Transformers that is saved and opened again, and what to say before; none where that is missing."""
    try:
        optional("transformers", "a cut language model, saved and opened again,")
    except MissingPackageError as error:
        return (), str(error)
    note = "a small Llama that counts, cut to 70% of its parameters, saved by save_pretrained:"
    return round_trips(args.seed, quick=args.quick), note


def _line(trip: RoundTrip) -> str:
    (before, after), (params, left) = trip.accuracy, trip.params
    said = "bit for bit the cut model" if trip.same else "NOT the cut model"
    fields = ", ".join(f"{name} {value}" for name, value in trip.fields.items())
    how = f"config.json says {fields}" if fields else "each layer has widths of its own"
    figures = f"parameters {count(params)} → {count(left)}, next number right {before:.1%} → {after:.1%}"
    return f"  opened by {trip.opened_with}: {said}; {figures}; {how}"


def _key(outcome: DemoOutcome) -> str:
    return outcome.name.lower().replace(" ", "-")


def _write(outcome: DemoOutcome, folder: Path, args: argparse.Namespace) -> None:
    key = _key(outcome)
    save(outcome.model, folder / f"{key}.safetensors")
    (folder / f"{key}.json").write_text(outcome.plan.to_json() + "\n", encoding="utf-8")
    stages = outcome.stages
    story = report.story(
        outcome.graph,
        outcome.plan,
        model=f"{outcome.name} on {args.data}",
        importance=Magnitude(),
        stages=tuple(stage.name for stage in stages),
        figures=(
            ("accuracy", tuple(stage.accuracy for stage in stages), "%"),
            ("latency", tuple(stage.seconds for stage in stages), "s"),
            ("file", tuple(stage.file_bytes for stage in stages), "B"),
        ),
        sweep=outcome.sweep,
        notes=(f"secateur demo --data {args.data} --seed {args.seed}; latency is of a batch of 128 on one thread.",),
    )
    report.write(story, folder, key)


def _table(outcomes: tuple[DemoOutcome, ...]) -> Any:
    columns = ("", "accuracy", "parameters", "MACs", "file", "latency")
    rows = []
    for outcome in outcomes:
        for stage in outcome.stages:
            figures = (f"{stage.accuracy:.1%}", count(stage.params), count(stage.macs), size(stage.file_bytes))
            rows.append((f"{outcome.name}, {stage.name}", *figures, f"{stage.seconds * 1e3:.2f} ms"))
    return table(columns, rows, numbers=columns[1:])
