"""What several commands take: a model, and how positions are chosen."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur import importance
from secateur.cli import examples, models, placing, report, text
from secateur.cli.exits import InputError, UsageError
from secateur.cli.folder import Folder
from secateur.cli.models import BuiltModel, Wanted, build
from secateur.cli.packages import did_you_mean, function
from secateur.cli.saved import check_name, fill
from secateur.cli.screen import Screen
from secateur.errors import TraceError
from secateur.io.compressing import Checkpoint
from secateur.tracing import Graph, trace

_NAMED = "FILE.py:NAME"
IMPORTANCES: dict[str, Callable[[argparse.Namespace], importance.Importance]] = {
    "magnitude": lambda args: importance.Magnitude(),
    "l1": lambda args: importance.Magnitude(p=1),
    "lamp": lambda args: importance.LAMP(),
    "fpgm": lambda args: importance.FPGM(),
    "bn": lambda args: importance.BNScale(),
    "random": lambda args: importance.Random(args.seed),
    "activation": lambda args: importance.Activation(batches(args, "activation")),
    "wanda": lambda args: importance.Wanda(batches(args, "wanda")),
    "reconstruction": lambda args: importance.Reconstruction(batches(args, "reconstruction")),
    "taylor": lambda args: importance.Taylor(batches(args, "taylor"), _loss(args)),
    "hessian": lambda args: importance.Hessian(batches(args, "hessian"), _loss(args)),
}


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL and what goes with it."""
    parser.add_argument("model", metavar="MODEL", help=models.HELP)
    parser.add_argument("--weights", type=Path, metavar="FILE", help="a safetensors file with the model's weights")
    parser.add_argument("--pretrained", action="store_true", help="download the weights that go with the name")
    parser.add_argument("--example", action="append", metavar="SHAPE", help=examples.HELP)
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default 0)")
    parser.add_argument("--device", metavar="NAME", help="where the model runs, as in cuda or cuda:1 (default cpu)")
    parser.add_argument("--dtype", metavar="NAME", help="of the weights, as in bfloat16 (default: their own)")


def add_choice(parser: argparse.ArgumentParser) -> None:
    """How positions are chosen."""
    names = ", ".join(IMPORTANCES)
    parser.add_argument("--importance", metavar="NAME", help=f"{names} (default magnitude)")
    parser.add_argument(
        "--data",
        metavar=f"{_NAMED}|TEXT",
        help="a function that returns batches, or for transformers:FOLDER a .txt file, for what looks at data",
    )
    parser.add_argument("--loss", metavar=_NAMED, help="a function loss(model, batch), for taylor and hessian")
    parser.add_argument("--exact", action="store_true", help="cut only where the cut is exact")
    parser.add_argument("--protect", action="append", default=[], metavar="GLOB", help="axes or layers that stay whole")
    parser.add_argument("--round-to", type=int, default=1, metavar="N", help="keep multiples of N positions")
    parser.add_argument(
        "--compensate", action="store_true", help="refit the remaining weights by least squares on --data"
    )


def use_data(args: argparse.Namespace) -> None:
    """Data and no word of what for: what makes the most of them, as `compress` does."""
    if args.data and args.importance is None and not args.compensate:
        args.importance, args.compensate = "reconstruction", True


def batches(args: argparse.Namespace, what: str) -> Any:
    """What `--data` returns, for what needs it."""
    if not args.data:
        raise UsageError(f"{what} looks at data; give it with --data {_NAMED}")
    if text.is_text(args.data):
        return text.fitted(args.data, args.model)
    device, dtype = placing.wanted(args)
    found = function(args.data, "--data")()
    if not isinstance(found, Iterable) or isinstance(found, torch.Tensor):
        kind = type(found).__name__
        raise InputError(f"{args.data} returned something of type {kind}; return batches, as a list or a loader")
    if device is None and dtype is None:
        return found if hasattr(found, "__len__") else list(found)  # a generator would be used up by the first pass
    return [placing.placed(batch, device, dtype) for batch in found]


def _loss(args: argparse.Namespace) -> Callable[..., Any]:
    if not args.loss:
        raise UsageError(f"--importance {args.importance} needs a loss; give it with --loss {_NAMED}")
    return function(args.loss, "--loss")


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `secateur.plan` that the command line gives."""
    name = args.importance or "magnitude"
    if args.round_to < 1:
        raise UsageError(f"--round-to {args.round_to}: give a whole number from 1 on")
    if name not in IMPORTANCES:
        known = ", ".join(IMPORTANCES)
        raise UsageError(f"there is no importance {name!r}{did_you_mean(name, IMPORTANCES)} It is one of {known}")
    chosen = IMPORTANCES[name](args)
    return {"importance": chosen, "exact": args.exact, "protect": tuple(args.protect), "round_to": args.round_to}


@dataclass(frozen=True)
class Traced:
    """A model that was built and traced."""

    name: str
    model: nn.Module
    graph: Graph
    example: Any
    files: Checkpoint | None = None  # where its weights are, if they are too many for memory


def checked_early(args: argparse.Namespace, folder: Folder | None = None) -> None:
    """Whatever can be seen to be wrong before a model is built."""
    models.check(args.model)
    placing.wanted(args)
    if args.weights is not None:
        check_name(args.weights)
    if args.example:
        examples.parse(args.example)
    if folder is not None:
        folder.check()
        if args.report:
            report.check()


def built(args: argparse.Namespace, screen: Screen, begin: Callable[[str], None], *, weights: bool) -> BuiltModel:
    """Build the model and give it its weights."""
    begin(f"building {args.model}")
    torch.manual_seed(args.seed)
    source = build(args.model, Wanted(args.pretrained, weights or args.weights is not None))
    if args.weights is not None:
        fill(source.model, args.weights)
    elif weights and not source.trained:
        name = models.name_of(args.model)
        screen.note(f"{name} has random weights; give its own with --weights FILE or --pretrained")
    return source


def traced(args: argparse.Namespace, screen: Screen, begin: Callable[[str], None], *, weights: bool) -> Traced:
    """Build the model, give it its weights and trace it."""
    source = built(args, screen, begin, weights=weights)
    if source.files is not None:
        if args.weights is not None or placing.wanted(args) != (None, None):
            what = "its weights stay in their files; leave out --weights, --device and --dtype"
            raise UsageError(f"{args.model} is too large for memory, so {what}")
        screen.note(f"{models.name_of(args.model)} is too large for memory: its weights stay in their files")
    device, dtype = placing.put(args, source.model)
    if args.example:
        example = placing.placed(examples.parse(args.example, dtype or torch.float32), device, None)
    else:  # the user's own keeps its type, unless another is asked for
        own = models.is_script(args.model)
        example = placing.placed(source.example, device, placing.wanted(args)[1] if own else dtype)
    if example is None:
        raise UsageError(f"{args.model}: what is its input? Give its shape, as in --example 1x3x224x224")
    begin("tracing")
    try:
        return Traced(models.name_of(args.model), source.model, trace(source.model, example), example, source.files)
    except TraceError as error:
        if args.example and "could not be run on the example" in str(error):
            raise UsageError(f"--example {' '.join(args.example)}: {error}") from error
        if args.example or models.is_script(args.model):
            raise
        raise TraceError(f"{error} The example was guessed; --example SHAPE gives another") from error
