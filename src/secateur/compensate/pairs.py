"""The full-size and the cut model on the same batch, stopping at the same products."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from secateur.calibrate import Lane, Product, Watch, call, lanes
from secateur.compensate.structure import NORMS, Structure
from secateur.errors import CalibrationError
from secateur.plan.plan import Plan
from secateur.surgery import named_tensors


def twin(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of a model to look back at after a cut; it shares the tensors that the plan replaces."""
    shared = {id(tensor): tensor for name, tensor in named_tensors(model) if name in plan.kept}
    try:
        return copy.deepcopy(model, dict(shared))
    except Exception as error:  # any code of the user's may run here
        raise CalibrationError(
            f"compensation compares with a copy of the uncut model, and {type(model).__name__} cannot be copied: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True)
class At:
    """Where a run stands: at a product (in the full-size model after it, with what came out), or before a norm."""

    product: Product | None
    streams: dict[int, Tensor]  # what ops made that products will be added to, by the number of the op
    out: Tensor | None = None
    norm: tuple[Tensor, ...] = ()  # the input, the running mean and the running variance


@dataclass(frozen=True)
class Both:
    """The same product in the full-size and in the cut model; only the cut one is about to run."""

    whole: At
    cut: At


class _Run:
    """One batch through one model."""

    def __init__(self, model: nn.Module, batch: Any, found: Structure, stops: Collection[str], *, whole: bool) -> None:
        self._model, self._batch, self._whole, self._stops = model, batch, whole, stops
        self._ends = {residual.other: name for name, residual in found.residuals.items()}  # when one is done with
        self._streams: dict[int, Tensor] = {}
        self._ops = 0

    def __call__(self, lane: Lane) -> Any:
        def on_product(product: Product, run: Callable[[], Any]) -> Any:
            if product.name not in self._stops:
                return self._made(run())
            out = run() if self._whole else None
            lane.pause(At(product, self._streams, out))
            out = run() if out is None else out
            for number in [n for n in self._streams if self._ends.get(n) == product.name]:
                del self._streams[number]
            return self._made(out)

        def on_op(op: Any, args: Any, _kwargs: Any, run: Callable[[], Any]) -> Any:
            if op in NORMS and not self._whole and args[3] is not None:
                lane.pause(At(None, self._streams, norm=(args[0], args[3], args[4])))
            return self._made(run())

        with Watch(self._model, on_product, on_op):
            return call(self._model, self._batch)

    def _made(self, out: Any) -> Any:
        self._ops += 1
        if self._ops in self._ends:
            self._streams[self._ops] = out[0] if isinstance(out, tuple | list) else out
        return out


class Pair:
    """One batch through both models."""

    def __init__(self, whole: Lane, cut: Lane) -> None:
        self._whole, self._cut = whole, cut

    def advance(self) -> Both | At | None:
        """Go on to the next product or norm of the cut model; at a product, the full-size one is there too."""
        cut: At | None = self._cut.advance()
        if cut is None or cut.product is None:
            return cut
        whole: At | None = self._whole.advance()
        if whole is None or whole.product is None or whole.product.name != cut.product.name:
            raise CalibrationError(
                f"the full-size and the cut model do not do the same on this batch: they part at {cut.product.name}"
            )
        return Both(whole, cut)

    def results(self) -> tuple[Any, Any]:
        """What both models put out, after the cut one is at its end."""
        while self._whole.advance() is not None:
            pass
        return self._whole.take(), self._cut.take()


@contextmanager
def pairs(
    whole: nn.Module, cut: nn.Module, found: tuple[Structure, Structure], batches: Sequence[Any], stops: Collection[str]
) -> Iterator[list[Pair]]:
    """A pair for each batch."""
    runs = [_Run(whole, batch, found[0], stops, whole=True) for batch in batches]
    runs += [_Run(cut, batch, found[1], stops, whole=False) for batch in batches]
    with lanes(runs) as made:
        yield [Pair(a, b) for a, b in zip(made, made[len(batches) :], strict=False)]
