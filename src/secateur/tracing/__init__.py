"""Know what can be cut in any model, by running it once on fake tensors."""

import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from secateur.arguments import FLAG, check
from secateur.axes import fix, note
from secateur.compat import fsdp1, is_compiled, is_lazy, uncompiled
from secateur.distributed import bare, is_sharded, present
from secateur.errors import TraceError
from secateur.sizes.size import expr_atoms, places
from secateur.state.collector import collected_later
from secateur.state.leftovers import let_go
from secateur.tracing.capture import Capture, ModelCall, Swaps, captured
from secateur.tracing.environment import line_of
from secateur.tracing.examples import Examples, examples_of
from secateur.tracing.graph import Axis, Blocked, Graph, Site, build
from secateur.tracing.makers import check_make
from secateur.tracing.rehearsal import rehearsed
from secateur.tracing.runs import join
from secateur.tracing.variants import Refused, Unseen, Variants, never_seen

_NESTED = str(Path(torch.nested.__file__).parent)

__all__ = ["Axis", "Blocked", "Examples", "Graph", "Site", "Unseen", "macs", "trace"]


def trace(model: nn.Module, example: Any, *, variants: bool = True, make: Any = None) -> Graph:
    """Find out what can be cut in a model.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    >>> print(sec.trace(net, torch.zeros(1, 3, 8, 8)).axes[0].name)
    0 channels

    `example` is what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments; several
    of them are `Examples(a, b)`. The model runs on fake tensors, which have no values, and nothing about it changes.
    Where that fails (its control flow depends on data), it runs on copies of the real tensors.

    One run is one witness, so with `variants` the model is also called with inputs of other sizes, a second time, in
    training mode, and with other settings (flags, arguments left out, methods beside forward that take tensors apart),
    as far as it takes that; what any run shows, holds. `graph.unseen` says what no run showed.

    A model that is spread over ranks (`fully_shard`, `parallelize_module`) is traced as it was before that.

    `make` says how the model is built, for `plan(..., loadable=True)` and for `load` without a model: a callable with
    its arguments, `functools.partial(Net, width=64)`. For models of Transformers, diffusers and timm it is found by
    itself.
    """
    check("trace", TraceError, locals(), variants=FLAG)
    check_make(make)
    present()
    with bare(unwrap(model, sharded=True)) as inner, collected_later():
        return replace(_trace(inner, example, variants), make=make)


def _trace(model: nn.Module, example: Any, variants: bool) -> Graph:
    if not any(True for _ in model.parameters()):
        raise TraceError(f"{type(model).__name__} has no parameters, so there is nothing to cut")
    check_run(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(f"{name or 'the model'} is TorchScript, whose code cannot be followed; trace the original")
        if getattr(module.__dict__.get("_hf_hook"), "offload", False):
            raise TraceError(
                f"the weights of {name or 'the model'} are offloaded by accelerate, so they are not there to be cut: "
                "accelerate.hooks.remove_hook_from_module(model, recurse=True) brings them back; offload the cut model"
            )
    first, *others = examples_of(example)
    capture, fake = _witness(model, first)
    for another in others:
        join(capture, _witness(model, another, timed=False)[0])
    idle = any(not v.used for name, v in capture.values.items() if capture.kinds[name] == "parameter")
    more = Variants(model, capture, partial(_attempt, model, fake=fake, flowing=idle))
    if variants:
        more.add(first)
    told = {one.where for one in more.unseen}
    unseen = [*more.unseen, *never_seen(model, (first, *others, *more.shown), capture, more.both_ways, told)]
    graph = build(model, (first, *others, *more.accepted), capture, unseen)
    if variants and fake and _rehearse(graph, capture, unseen):
        graph = build(model, (first, *others, *more.accepted), capture, unseen)
    return graph


def _rehearse(graph: Graph, capture: Capture, unseen: list[Unseen]) -> bool:
    """Find axes on whose sizes more depends than sizes tell; whether there is anything new."""
    assert capture.numbers is not None
    exact = {axis.atom for axis in graph.axes if axis.exact}
    axes = [axis.atom for axis in graph.axes]
    following = {place for place, expr in graph.equations.definitions.items() if expr_atoms(expr)}
    leaked = any(expr_atoms(e) or not following.isdisjoint(places(e)) for e in capture.tracer.sizes.leaks)
    if not axes or not (capture.numbers.unaccounted or capture.tracer.sizes.unexplained or leaked):
        return False
    try:
        found = rehearsed(
            graph.model, graph.example, capture.numbers.calls, graph.layouts, graph.equations, axes, exact
        )
    except Exception as error:
        unseen.append(Unseen(f"what else depends on sizes: {error}", ""))
        return True
    for atom, turn in found.items():
        (fix if turn.fatal else note)(atom, str(turn))
    return bool(found)


def macs(model: nn.Module, example: Any) -> int:
    """How many multiply-accumulates one run on the example takes.

    >>> import secateur as sec
    >>> sec.macs(nn.Linear(4, 8), torch.zeros(10, 4))
    320

    Counts what matrix products, convolutions, attention and recurrent layers do, as `torch.utils.flop_counter` counts
    it where it knows the op (it passes over fused attention and fused LSTMs on a CPU; this does not).
    """
    return trace(model, example, variants=False).macs()


def check_run(model: nn.Module) -> None:
    """Refuse a model some of whose tensors get a shape in its first run: to run it changes it."""
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise TraceError(f"{type(model).__name__} has lazy layers that have not run; call the model once first")


def unwrap(model: Any, *, sharded: bool = False, name: str = "a model") -> nn.Module:
    """The model inside of what `torch.compile` and `DistributedDataParallel` make of it; refused if it is `sharded`
    over ranks where that cannot be."""
    if not isinstance(model, nn.Module):
        raise TraceError(f"{name} is an nn.Module, not {type(model).__name__}")
    while True:
        if is_compiled(model):
            model = uncompiled(model)
        elif isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif any(isinstance(module, fsdp1() or ()) for module in model.modules()):
            raise TraceError(
                f"{type(model).__name__} has its parameters flattened by FullyShardedDataParallel; shard it with "
                "fully_shard (FSDP2) instead, or cut it before"
            )
        elif not sharded and is_sharded(model):
            raise TraceError(
                f"{type(model).__name__} is spread over ranks: sec.apply(model, plan, shard=fn) cuts it and "
                "sec.compress(…, shard=fn) does, with fn as it was sharded; what takes no shard= is done before that"
            )
        else:
            return model


def _witness(model: nn.Module, example: Any, *, timed: bool = True) -> tuple[Capture, bool]:
    """A run on fake tensors or, where that fails, on copies of the real ones; and which of these it was."""
    for fake in (True, False):
        made: list[Any] = []
        try:
            return captured(model, [ModelCall(example)], made, fake=fake, timed=timed), fake
        except TraceError:
            raise
        except Exception as error:  # any code of the user's may run here
            traceback.clear_frames(error.__traceback__)
            if not fake or any(tensor.is_meta for tensor in model.parameters()):
                raise TraceError(_story(model, error)) from error
        finally:
            let_go(made)
    raise AssertionError


def _attempt(
    model: nn.Module,
    calls: Sequence[ModelCall],
    swapped: Swaps = (),
    contrary: Sequence[str] = (),
    *,
    fake: bool,
    flowing: bool,
    real: bool = False,
) -> Capture | Refused:
    """Further calls, which the model may refuse; on real tensors if the example needed them, or on request.

    `flowing`: something is idle, which only what flows beside it can tell of.
    """
    made: list[Any] = []
    begun: list[Capture] = []
    try:
        how: Any = {"swapped": swapped, "contrary": contrary, "begun": begun, "flowing": flowing, "timed": False}
        return captured(model, calls, made, fake=fake and not real, **how)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        return Refused(len(begun[-1].outputs) if begun else 0, _problem(error), line_of(error))
    finally:
        let_go(made)


def _story(model: nn.Module, error: Exception) -> str:
    """Where the user's own code failed, and with what."""
    where = line_of(error)
    if any(_NESTED in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
        return (
            f"{type(model).__name__} uses nested tensors{where and f' at {where}'}, whose dimensions have no one size "
            "that could be followed; pad what it works on instead (torch.nested.to_padded_tensor, or a mask)"
        )
    kind, _, rest = _problem(error).partition(": ")
    return (
        f"{type(model).__name__} could not be run on the example: {kind}{where and f' at {where}'}: {rest}. "
        "Check that model(example) works: a tensor is passed as it is, a tuple as arguments, a dict by keyword."
    )


def _problem(error: Exception) -> str:
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0]}"
