"""What several commands take: a model, and how positions are chosen."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.cli import examples, models
from secateur.cli.exits import InputError, UsageError
from secateur.cli.models import Wanted, build
from secateur.cli.packages import did_you_mean
from secateur.cli.screen import Screen
from secateur.cli.script import function
from secateur.cli.weights import check_name, fill
from secateur.errors import TraceError
from secateur.importance import (
    FPGM,
    LAMP,
    Activation,
    BNScale,
    Hessian,
    Importance,
    Magnitude,
    Random,
    Reconstruction,
    Taylor,
    Wanda,
)
from secateur.trace import Graph, trace

_NAMED = "FILE.py:NAME"
IMPORTANCES: dict[str, Callable[[argparse.Namespace], Importance]] = {
    "magnitude": lambda args: Magnitude(),
    "l1": lambda args: Magnitude(p=1),
    "lamp": lambda args: LAMP(),
    "fpgm": lambda args: FPGM(),
    "bn": lambda args: BNScale(),
    "random": lambda args: Random(args.seed),
    "activation": lambda args: Activation(batches(args, "activation")),
    "wanda": lambda args: Wanda(batches(args, "wanda")),
    "reconstruction": lambda args: Reconstruction(batches(args, "reconstruction")),
    "taylor": lambda args: Taylor(batches(args, "taylor"), _loss(args)),
    "hessian": lambda args: Hessian(batches(args, "hessian"), _loss(args)),
}


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL and what goes with it."""
    parser.add_argument("model", metavar="MODEL", help=models.HELP)
    parser.add_argument("--weights", type=Path, metavar="FILE", help="a safetensors file with the model's weights")
    parser.add_argument("--pretrained", action="store_true", help="download the weights that go with the name")
    parser.add_argument("--example", action="append", metavar="SHAPE", help=examples.HELP)
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default 0)")


def add_choice(parser: argparse.ArgumentParser) -> None:
    """How positions are chosen."""
    names = ", ".join(IMPORTANCES)
    parser.add_argument("--importance", default="magnitude", metavar="NAME", help=f"{names} (default magnitude)")
    parser.add_argument("--data", metavar=_NAMED, help="a function that returns batches, for what looks at data")
    parser.add_argument("--loss", metavar=_NAMED, help="a function loss(model, batch), for taylor and hessian")
    parser.add_argument("--exact", action="store_true", help="cut only where the cut is exact")
    parser.add_argument("--protect", action="append", default=[], metavar="GLOB", help="axes or layers that stay whole")
    parser.add_argument("--round-to", type=int, default=1, metavar="N", help="keep multiples of N positions")


def batches(args: argparse.Namespace, what: str) -> Any:
    """What `--data` returns, for what needs it."""
    if not args.data:
        raise UsageError(f"{what} looks at data; give it with --data {_NAMED}")
    found = function(args.data, "--data")()
    if not isinstance(found, Iterable) or isinstance(found, torch.Tensor):
        kind = type(found).__name__
        raise InputError(f"{args.data} returned something of type {kind}; return batches, as a list or a loader")
    return found if hasattr(found, "__len__") else list(found)  # a generator would be used up by the first pass


def _loss(args: argparse.Namespace) -> Callable[..., Any]:
    if not args.loss:
        raise UsageError(f"--importance {args.importance} needs a loss; give it with --loss {_NAMED}")
    return function(args.loss, "--loss")


def importance(args: argparse.Namespace) -> Importance:
    """The criterion that `--importance` names."""
    name = args.importance
    if name not in IMPORTANCES:
        raise UsageError(
            f"there is no importance {name!r}{did_you_mean(name, IMPORTANCES)} It is one of {', '.join(IMPORTANCES)}"
        )
    return IMPORTANCES[name](args)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `secateur.plan` that the command line gives."""
    return {
        "importance": importance(args),
        "exact": args.exact,
        "protect": tuple(args.protect),
        "round_to": args.round_to,
    }


@dataclass(frozen=True)
class Traced:
    """A model that was built and traced."""

    name: str
    model: nn.Module
    graph: Graph
    example: Any


def checked_early(args: argparse.Namespace) -> None:
    """Whatever can be seen to be wrong before a model is built."""
    models.check(args.model)
    if args.weights is not None:
        check_name(args.weights)
    if args.example:
        examples.parse(args.example)


def traced(args: argparse.Namespace, screen: Screen, begin: Callable[[str], None], *, weights: bool) -> Traced:
    """Build the model, give it its weights and trace it."""
    begin(f"building {args.model}")
    name = models.name_of(args.model)
    torch.manual_seed(args.seed)
    source = build(args.model, Wanted(args.pretrained, weights or args.weights is not None))
    if args.weights is not None:
        fill(source.model, args.weights)
    elif weights and not source.trained:
        screen.note(f"{name} has random weights; give its own with --weights FILE or --pretrained")
    example = examples.parse(args.example) if args.example else source.example
    if example is None:
        raise UsageError(f"{args.model}: what is its input? Give its shape, as in --example 1x3x224x224")
    begin("tracing")
    try:
        return Traced(name, source.model, trace(source.model, example), example)
    except TraceError as error:
        if args.example or models.is_script(args.model):
            raise
        raise TraceError(f"{error} The example was guessed; --example SHAPE gives another") from error
