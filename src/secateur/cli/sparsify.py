"""`secateur sparsify`: zeros in place, from a little data, written so that what opened the model opens the result."""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from secateur.cli import pretrained, text
from secateur.cli.arguments import add_model, batches, built, checked_early
from secateur.cli.exits import Exit, UsageError
from secateur.cli.folder import Folder, made_inside
from secateur.cli.models import name_of
from secateur.cli.packages import optional
from secateur.cli.screen import Screen, size
from secateur.errors import PlanError
from secateur.importance import Magnitude, Wanda
from secateur.io.compressing import Checkpoint
from secateur.report.zero_map import write_zeros
from secateur.sparse import ADMM, NM, RIA, Block, Pattern, SparseGPT, Unstructured, sparsify
from secateur.sparse.files import zeros_in_files

HELP = "set weights to zero in one shot, by a pattern, from a little data"
MODEL, REPORT, PICTURE = "model.safetensors", "sparsity.json", "zeros.png"
_ONE_OF = 8  # batches, if there are that many, is held back and judges
METHODS: dict[str, Callable[[], Any]] = {
    "admm": ADMM,
    "sparsegpt": SparseGPT,
    "wanda": Wanda,
    "ria": RIA,
    "magnitude": Magnitude,
}
NAMES = (MODEL, REPORT, PICTURE, *pretrained.NAMES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_model(parser)
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument(
        "--sparsity", type=float, metavar="FRACTION", help="zeros anywhere: this fraction of each weight"
    )
    kinds.add_argument("--nm", metavar="N:M", help="N of every M inputs stay, as in 2:4")
    kinds.add_argument(
        "--block", metavar="HxW[:FRACTION]", help="zeros in blocks of H outputs by W inputs, as in 4x1:0.5"
    )
    parser.add_argument("--method", default="admm", choices=METHODS, help="how zeros are chosen (default admm)")
    parser.add_argument(
        "--data",
        metavar="FILE.py:NAME|TEXT",
        required=True,
        help="a function that returns batches, or for transformers:FOLDER a .txt file; an eighth is held back",
    )
    parser.add_argument("--protect", action="append", default=[], metavar="GLOB", help="weights that stay dense")
    parser.add_argument(
        "--include", action="append", default=[], metavar="GLOB", help="a head or embedding that does not"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the results go (default: the model's name)")
    parser.add_argument("--force", action="store_true", help="replace results that are there already")
    parser.add_argument("--picture", action="store_true", help=f"draw where the zeros are, as {PICTURE}")
    parser.set_defaults(report=False)


def run(args: argparse.Namespace, screen: Screen) -> Exit:
    """Set weights of a model to zero and write what came out."""
    chosen = pattern(args)
    folder = Folder(args.out or Path(f"{name_of(args.model)}-sparse"), NAMES, args.force)
    checked_early(args, folder)
    if args.picture:
        optional("matplotlib", "--picture")
    data, judges = _held_back(args)
    with screen.steps(3) as steps:
        source = built(args, screen, steps.begin, weights=True)
        if source.files is not None:
            folder.check_empty()
            screen.note(f"{name_of(args.model)} is too large for memory: its weights stay in their files")
        model, reads = source.model, list[float]()
        steps.begin("sparsifying")
        reads += [text.perplexity(args.data, args.model, model)] if text.is_text(args.data) else []
        options = {"method": METHODS[args.method](), "protect": args.protect, "include": args.include}
        with folder.filled(need=sum(p.numel() * p.element_size() for p in model.parameters())) as new:
            with steps.aside():
                if source.files is None:
                    report = sparsify(model, data, chosen, held_back=judges, **options)
                else:
                    with made_inside(new) as place:
                        report = zeros_in_files(source.files, chosen, data, place, held_back=judges, **options)
                    model = Checkpoint.of(new).model
            reads += [text.perplexity(args.data, args.model, model)] if reads else []
            steps.begin("saving")
            if source.files is None:
                pretrained.write(model, Path(args.model.partition(":")[2]), new / MODEL)
            told = {**asdict(report), "sparsity": report.sparsity, "perplexity": reads or None}
            (new / REPORT).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
            if args.picture:
                write_zeros(model, new / PICTURE)
            files = {file.name: file.stat().st_size for file in sorted(new.iterdir())}
    screen.data({**told, "folder": str(folder.path), "files": files})
    screen.show(str(report), "", *(f"{folder.path / name}  {size(number)}" for name, number in files.items()))
    if reads:
        screen.note(f"perplexity on text that was not fitted: {reads[0]:.2f} → {reads[1]:.2f}")
    return Exit.DONE


def _held_back(args: argparse.Namespace) -> tuple[Any, Any]:
    """The batches to solve with, and those to judge by; None where there are too few to hold any back."""
    if text.is_text(args.data):
        return text.fitted(args.data, args.model), text.held_back(args.data, args.model)
    found = list(batches(args, "sparsify"))
    count = len(found) // _ONE_OF
    return (found[:-count], found[-count:]) if count else (found, None)


def pattern(args: argparse.Namespace) -> Pattern:
    """The pattern that the command line gives.

    >>> pattern(argparse.Namespace(sparsity=None, nm="2:4", block=None))
    NM(n=2, m=4)
    """
    try:
        if args.sparsity is not None:
            return Unstructured(args.sparsity)
        text = args.nm or args.block
        found = re.fullmatch(r"(\d+):(\d+)" if args.nm else r"(\d+)x(\d+)(?::([\d.]+))?", text)
        if found is None:
            raise UsageError(
                f"--nm {text}: say N:M, as in 2:4" if args.nm else f"--block {text}: say HxW, as in 4x1:0.5"
            )
        one, two = int(found[1]), int(found[2])
        return NM(one, two) if args.nm else Block(one, two, float(found[3] or 0.5))
    except (PlanError, ValueError) as error:
        raise UsageError(str(error)) from error
