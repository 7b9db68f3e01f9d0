"""Know what can be cut in any model, by running it once on fake tensors."""

from __future__ import annotations

import contextlib
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from secateur.errors import TraceError
from secateur.trace.capture import Capture
from secateur.trace.graph import Axis, Blocked, Graph, Site, build

__all__ = ["Axis", "Blocked", "Graph", "Site", "macs", "trace"]


def trace(model: nn.Module, example: Any) -> Graph:
    """Find out what can be cut in a model.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    >>> print(sec.trace(net, torch.zeros(1, 3, 8, 8)).axes[0].name)
    0 channels

    `example` is what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments. The
    model runs once, on fake tensors: no weight is read and nothing about the model changes. Where that fails (its
    control flow depends on data), it runs on copies of the real tensors.
    """
    model = unwrap(model)
    if not any(True for _ in model.parameters()):
        raise TraceError(f"{type(model).__name__} has no parameters, so there is nothing to cut")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(f"{name or 'the model'} is TorchScript, whose code cannot be followed; trace the original")
    capture = _capture(model, example, training=False, into=None)
    steps = tuple(capture.tracer.steps)
    if any(not value.used for name, value in capture.values.items() if capture.kinds[name] == "parameter"):
        with contextlib.suppress(TraceError):  # some models cannot train on one example; eval is what counts
            _capture(model, example, training=True, into=capture)
    return build(model, example, capture, steps)


def macs(model: nn.Module, example: Any) -> int:
    """How many multiply-accumulates one run on the example takes.

    >>> import secateur as sec
    >>> sec.macs(nn.Linear(4, 8), torch.zeros(10, 4))
    320

    Counts what matrix products, convolutions, attention and recurrent layers do, as `torch.utils.flop_counter` counts
    it where it knows the op (it passes over fused attention and fused LSTMs on a CPU; this does not).
    """
    return trace(model, example).macs()


def unwrap(model: Any) -> nn.Module:
    """The model inside of what `torch.compile` and `DistributedDataParallel` make of it."""
    if not isinstance(model, nn.Module):
        raise TraceError(f"a model is an nn.Module, not {type(model).__name__}")
    while True:
        if _compiled(model):
            model = model._orig_mod
        elif isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def _compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` wrapped a model; its package, which takes seconds to import, is there if it did."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def _capture(model: nn.Module, example: Any, *, training: bool, into: Capture | None) -> Capture:
    """A run on fake tensors or, where that fails, on copies of the real ones."""
    try:
        return Capture(model, example, fake=True, training=training, into=into)
    except TraceError:
        raise
    except Exception as fake_error:  # any code of the user's may run here
        if any(tensor.is_meta for tensor in model.parameters()):
            raise TraceError(_story(model, fake_error)) from fake_error
    try:
        return Capture(model, example, fake=False, training=training, into=into)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(_story(model, error)) from error


def _story(model: nn.Module, error: Exception) -> str:
    """Where the user's own code failed, and with what."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parents[1])
    torch_home = str(Path(torch.__file__).parent)
    theirs = [f for f in frames if not f.filename.startswith((own, torch_home))]
    where = f" at {Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else ""
    first = str(error).strip().splitlines() or [""]
    return (
        f"{type(model).__name__} could not be run on the example: {type(error).__name__}{where}: {first[0]}. "
        "Check that model(example) works: a tensor is passed as it is, a tuple as arguments, a dict by keyword."
    )
