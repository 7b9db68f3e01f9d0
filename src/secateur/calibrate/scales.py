"""What reads what a vector of a model has scaled: a norm's weight, say, may as well be in the products behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate.blame import blamed_on_batch
from secateur.calibrate.data import is_dealt, own
from secateur.calibrate.observe import Watch, calibrating, call
from secateur.calibrate.resume import Step
from secateur.calibrate.stages import Runs
from secateur.calibrate.sums import added
from secateur.distributed import totals
from secateur.ops.norm import BATCH_NORMS, RMS_NORMS
from secateur.ops.pointwise import SCALES
from secateur.ops.view import KEEP_ORDER
from secateur.tracing.examples import tensors_in

_TAG = "_secateur_scaled_by"


@dataclass
class Scaled:
    """Who reads what vectors have scaled."""

    read: dict[str, set[str | None]] = field(
        default_factory=lambda: defaultdict(set)
    )  # by each product; None: no scale
    escaped: dict[str, str] = field(default_factory=dict)  # the ops that are no products, by vector
    biases: dict[str, str] = field(default_factory=dict)  # of products that have one


def scaled(runs: Runs) -> Scaled:
    """Run a model once and see what becomes of what its vectors scale."""
    recorder = _Recorder(runs)
    runs.record(recorder)
    return recorder.found


def spreads(model: nn.Module, norms: Mapping[str, int], batches: Sequence[Any]) -> Mapping[str, Tensor]:
    """The covariance of what each of some batch norms is given, by the name of its mean, with its channels."""
    if not norms:
        return {}
    sums = {name: torch.zeros(size + 1, size + 1, dtype=torch.float64) for name, size in norms.items()}

    def on_op(op: Any, args: Any, _: Any, run: Any) -> Any:
        name = watch.parameters.name(args[3]) if op in BATCH_NORMS else None
        if name is not None and name in sums:
            x = args[0].transpose(0, 1).flatten(1).double()
            x = torch.cat([x, torch.ones_like(x[:1])])  # so that rows and their sums are in the same product
            sums[name] = added(sums[name], x @ x.T)
        return run()

    watch = Watch(model, lambda _, run: run(), on_op)
    with calibrating(model):
        for number in own(batches):
            with blamed_on_batch(number, "rotations"), watch:
                call(model, batches[number])
    if is_dealt(batches):
        sums = dict(zip(sums, totals("batch norms", list(sums.values())), strict=True))
    means = {name: each / each[-1, -1] for name, each in sums.items()}
    return {name: each[:-1, :-1] - each[-1, :-1].outer(each[-1, :-1]) for name, each in means.items()}


class _Recorder:
    """Follows one run. The vector that scaled a tensor is pinned to it."""

    def __init__(self, runs: Runs) -> None:
        self.found = Scaled()
        self._parameters = runs.parameters

    def __call__(self, step: Step) -> Any:
        given = [scale for tensor in tensors_in(step.args) if (scale := tensor.__dict__.get(_TAG)) is not None]
        product, by = step.product, self._scale(step)
        if product is not None:
            self.found.read[product.name].update(given or [None])
            if product.bias is not None:
                self.found.biases[product.name] = product.bias
        out = step.run()
        made = out[0] if isinstance(out, tuple | list) and out else out
        handed_on = step.op in KEEP_ORDER or _is_all_of(made, step.args)
        if product is None and not handed_on:
            self.found.escaped |= dict.fromkeys(given, str(step.op.name()))
        passed = given[0] if given and handed_on else by
        if isinstance(made, Tensor) and product is None and passed is not None:
            made.__dict__[_TAG] = passed
        return out

    def _scale(self, step: Step) -> str | None:
        """The vector that an op multiplies data with, position by position."""
        if step.op in RMS_NORMS:
            return self._parameters.name(step.args[2]) if len(step.args) > 2 else None
        if step.op not in SCALES:
            return None
        names = [self._parameters.name(arg) if isinstance(arg, Tensor) else "" for arg in step.args[:2]]
        found = [name for name in names if name and self._parameters.tensors[name].ndim == 1]
        return found[0] if len(found) == 1 and None in names else None


def _is_all_of(made: Any, args: Sequence[Any]) -> bool:
    """Whether a tensor is what an op was given, seen in the same way: a slice from end to end, say."""
    given = args[0] if args else None
    if not isinstance(made, Tensor) or not isinstance(given, Tensor) or made.data_ptr() != given.data_ptr():
        return False
    return made is not given and made.shape == given.shape and made.stride() == given.stride()
