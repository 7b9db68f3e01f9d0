"""Refit one layer after the other of a cut model to what the full-size one puts out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from secateur.calibrate import Product
from secateur.compensate.moments import Moments, fitted
from secateur.compensate.outcome import Layer
from secateur.compensate.pairs import At, Both
from secateur.compensate.repeated import Slot, stays
from secateur.compensate.structure import Norm, Residual, Structure
from secateur.plan.plan import Plan

_NOTHING = 1e-6  # an error, as a share of a layer's variance, that is rounding
_FAINT = 1e-3  # a scale below which nothing can be made up for


class Options(Protocol):
    """What is to be solved for."""

    weights: bool
    shifts: bool
    statistics: bool
    ridge: float


class Refit:
    """The layers of a cut model, refitted as runs reach them."""

    def __init__(
        self,
        options: Options,
        found: tuple[Structure, Structure],
        plan: Plan,
        tensors: Mapping[str, Tensor],
        stops: frozenset[str],
    ) -> None:
        self.stops = stops
        self._options, self._found, self.tensors = options, found, tensors
        self.kept = {name: {d: torch.as_tensor(k) for d, k in dims.items()} for name, dims in plan.kept.items()}
        self._shifted: set[str] = set()  # running means that took the shift of a refitted layer
        self._met = set(stops)
        self._layers: dict[tuple[str, int], Layer] = {}

    # what a run meets ------------------------------------------------------------------------------------------

    def product(self, steps: Sequence[Both]) -> None:
        """All batches are at a product: solve for its weight."""
        folds = Moments(), Moments()
        for number, both in enumerate(steps):
            self._take(folds[number % 2], both, len(steps), number)
        assert steps[0].cut.product is not None
        self.solve(folds, steps[0].cut.product)

    def norm(self, steps: Sequence[At]) -> None:
        """All batches are at a batch norm: take its statistics anew, unless it took the shift of a layer."""
        _, mean, var = steps[0].norm
        name = next((n for n in self._found[1].means if self.tensors[n].data_ptr() == mean.data_ptr()), None)
        if not self._options.statistics or name is None or name in self._shifted or self._found[1].means[name] > 1:
            return
        parts = [step.norm[0] for step in steps]
        dims = [d for d in range(parts[0].ndim) if d != 1]
        count = sum(part.numel() // max(part.shape[1], 1) for part in parts)
        if count < 2:
            return
        middle = torch.stack([part.sum(dims, dtype=torch.float64) for part in parts]).sum(0) / count
        around = middle.view([-1 if d == 1 else 1 for d in range(parts[0].ndim)])
        spread = torch.stack([(part - around.to(part.dtype)).square().sum(dims, dtype=torch.float64) for part in parts])
        mean.copy_(middle)
        var.copy_(spread.sum(0) / (count - 1))

    # one layer -------------------------------------------------------------------------------------------------

    def _take(self, moments: Moments, both: Both, shares: int, number: int) -> None:
        """Take in what one batch gives to the cut product, and what should come out."""
        whole, cut = both.whole.product, both.cut.product
        assert whole is not None
        assert cut is not None
        assert both.whole.out is not None
        if not cut.narrow or whole.places != cut.places:
            return
        sample = whole.sample(-(-whole.enough // shares), number)
        pick = _picked(whole, self.kept.get(whole.name, {}))
        gap = self._gap(both, pick)
        missing = None if gap is None else cut.outputs(gap, sample)
        groups, outputs = cut.weight.shape[:2]
        for x, out in zip(cut.rows(sample), whole.outputs(both.whole.out, sample), strict=True):
            y = out if pick is None else _regrouped(out, pick, groups, outputs)
            moments.add(x, y if missing is None else y + next(missing))

    def _gap(self, both: Both, pick: Tensor | None) -> Tensor | None:
        """What the stream that a product is added to lacks in the cut model, in the units and shape of its output."""
        residuals = [found.residuals.get(both.cut.product.name) for found in self._found]  # type: ignore[union-attr]
        if residuals[0] is None or residuals[1] is None or both.whole.out is None:
            return None
        stream, left = both.whole.streams.get(residuals[0].other), both.cut.streams.get(residuals[1].other)
        if stream is None or left is None or stream.numel() != both.whole.out.numel():
            return None
        stream = stream.reshape(both.whole.out.shape)
        stream = stream if pick is None else stream.index_select(1, pick.to(stream.device))
        if stream.numel() != left.numel():
            return None
        scale = self._scale(residuals[1])
        shape = [-1 if d == 1 else 1 for d in range(stream.ndim)]
        return (stream - left.reshape(stream.shape)) / scale.to(stream).view(shape if scale.ndim else ())

    def _scale(self, residual: Residual) -> Tensor:
        """What an output is multiplied with before it is added to the stream; infinite where that is next to zero."""
        scale = torch.ones((), dtype=torch.float64)
        if residual.norm is not None:
            scale = scale * self._norm_scale(residual.norm)
        for name in residual.scales:
            scale = scale * self.tensors[name].detach().double().cpu()
        return torch.where(scale.abs() < _FAINT, torch.inf, scale)

    def _norm_scale(self, norm: Norm) -> Tensor:
        one = torch.ones((), dtype=torch.float64)
        weight = one if norm.weight is None else self.tensors[norm.weight].detach().double().cpu()
        var = one if norm.var is None else self.tensors[norm.var].double().cpu()
        return weight / (var + norm.eps).sqrt()

    def solve(self, folds: tuple[Moments, Moments], product: Product | Slot) -> None:
        """Put the weight and shift into a product of the cut model that fit best, if they are better than its own."""
        name, moments = product.name, folds[0] + folds[1]
        self._met.add(name)
        if not moments.rows:
            wide = isinstance(product, Product) and not product.narrow
            why = "too wide to be refitted" if wide else "not refitted: its inputs lost rows, not only summed positions"
            self._layers[product.part] = Layer(name, float("nan"), float("nan"), why)
            return
        norm = self._found[1].norms.get(name) if name in self.stops else None
        if norm is not None and self._found[1].means[norm.mean] > 1:
            norm = None  # other layers go through it too: it cannot take the shift of one
        bias, start = product.shift, product.weight
        free = self._options.shifts and (bias is not None or norm is not None)
        old = None if bias is None else bias.squeeze(1).double().cpu()
        before = moments.error(start, old)
        scale = float(moments.spread().sum().clamp_min(1e-30))
        off = float(before.sum()) / scale
        if off < _NOTHING:
            return
        weight, shift = start.double().cpu(), moments.shift(start) if free else torch.zeros_like(before)
        if self._options.weights:
            weight, shift = fitted(moments, folds, start, self._options.ridge, free)
        elif not free:
            return
        weight = weight.to(start.dtype)
        after = moments.error(weight, shift if free else old)
        note = ""
        if not float(after.sum()) < float(before.sum()):
            after, note = before, "left as it was: no better fit was found"
        else:
            self._write(product, weight, shift if free else None, norm)
        self._layers[product.part] = Layer(name, off, float(after.sum()) / scale, note)

    def _write(self, product: Product | Slot, weight: Tensor, shift: Tensor | None, norm: Norm | None) -> None:
        if self._options.weights:
            product.write(weight)
        if shift is None:
            return
        if product.shift is not None:
            product.write_shift(shift)
        elif norm is not None:
            mean = self.tensors[norm.mean]
            mean.sub_(shift.flatten().to(mean))
            self._shifted.add(norm.mean)

    # what was reached ------------------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Each layer that was met and was off."""
        return tuple(self._layers.values())

    def notes(self, plan: Plan) -> Iterator[str]:
        """What was cut and is multiplied with data, but was not refitted."""
        found = self._found[0]
        for name in plan.kept if self._options.weights else ():
            if name in found.derived:
                yield f"{name} was not refitted: data are multiplied with what is made of it, not with itself"
            elif name in found.products and name not in self._met:
                yield f"{name} was not refitted: it is used in more than one place"


def _picked(whole: Product, kept: Mapping[int, Tensor]) -> Tensor | None:
    """Which outputs of a full-size product (over all groups) its cut one has; None: all."""
    if not kept:
        return None
    picked = stays(whole, kept).any(2).flatten()
    return None if bool(picked.all()) else picked.nonzero().flatten()


def _regrouped(out: Tensor, pick: Tensor, groups: int, outputs: int) -> Tensor:
    """Picked columns of (groups, rows, outputs), in the groups of the cut product."""
    flat = out.transpose(0, 1).flatten(1).index_select(1, pick.to(out.device))
    return flat.unflatten(1, (groups, outputs)).transpose(0, 1)
