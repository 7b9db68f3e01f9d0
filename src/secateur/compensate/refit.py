"""Refit one layer after the other of a cut model to what the full-size one puts out.

A layer of the cut model gets inputs x from layers that were cut and refitted before it; the same layer of the full-size
model put out y. The new weight is the ridge regression of y on x. Three things are beside that: outputs that the layer
no longer has are left out of y; where the output is added to a residual stream, y also holds what that stream lacks, so
that a layer makes up for those before it; and a layer without a bias in front of a batch norm shifts the norm's mean.
Parameters that a run uses more than once, such as the recurrence of an RNN, are fitted to the full-size model alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur.calibrate import ParameterProduct, Watch, call
from secateur.calibrate.blame import batch_name, blamed_on_batch
from secateur.calibrate.data import is_dealt, own, with_first
from secateur.calibrate.products import Part
from secateur.calibrate.structure import Norm, Residual, Structure
from secateur.compat import storage_id
from secateur.compensate.moments import Folds, Moments, fitted, squared
from secateur.compensate.pairs import Both, Pairs
from secateur.compensate.recipes import Compensation, LayerFit
from secateur.distributed import pooled, ranks, totals
from secateur.errors import CalibrationError
from secateur.planning.plans import Plan

KeptTensors = Mapping[str, Mapping[int, Tensor]]

_NOTHING = 1e-6  # an error, as a share of a layer's variance, that is rounding
_ROWS = 4  # times as many as ranking needs
Solution = tuple[float, float, str, Tensor | None, Tensor | None]  # off before and after, a note, weight, shift
_FAINT = 1e-3  # a scale below which nothing can be made up for


class Refit:
    """The layers of a cut model, refitted as runs reach them."""

    def __init__(
        self,
        recipe: Compensation,
        found: tuple[Structure, Structure],
        plan: Plan,
        tensors: Mapping[str, Tensor],
        stops: frozenset[str],
        held: frozenset[int],
    ) -> None:
        self.stops, self._held = stops, held
        self._recipe, self._found, self.tensors = recipe, found, tensors
        self.kept = {name: {d: torch.as_tensor(k) for d, k in dims.items()} for name, dims in plan.kept.items()}
        self._shifted: set[str] = set()  # running means that took the shift of a refitted layer
        self._met = set(stops)
        self._layers: dict[Part, LayerFit] = {}

    # what a run meets ------------------------------------------------------------------------------------------

    def stage(self, names: Sequence[str], pairs: Pairs) -> None:
        """Take all batches to some products, or to a batch norm, and solve for what is there."""
        if names[0] in self.stops:
            self._products(names, pairs)
        elif names[0] not in self._shifted:
            self._norm(names[0], pairs)

    def _products(self, names: Sequence[str], pairs: Pairs) -> None:
        """Solve for the weights of products that read the same data."""
        folds = {name: Folds(self._held) for name in names}
        met: dict[str, ParameterProduct] = {}
        mine = set(own(pairs.batches))
        for number in with_first(pairs.batches):
            known: dict[Any, Tensor] = {}

            def take(both: Both, number: int = number, known: dict[Any, Tensor] = known) -> None:
                name = both.cut.product.name
                met[name] = both.cut.product
                if number in mine:
                    self._take(folds[name].of(number), both, len(pairs.batches), number, known)

            pairs.products(names, number, take)
        self.solve([(met[name], folds[name]) for name in names], is_dealt(pairs.batches))

    def _norm(self, name: str, pairs: Pairs) -> None:
        """Take the statistics of a batch norm anew."""
        mean = self.tensors[name]
        var = self.tensors[self._found[1].variances[name]]
        sums = mean.new_zeros((3, len(mean)), dtype=torch.float64)  # how many, distances from the mean, their squares

        def take(data: Tensor) -> None:
            off = (data - mean.view([-1 if d == 1 else 1 for d in range(data.ndim)])).transpose(0, 1).flatten(1)
            off = off.double()
            sums.add_(torch.stack([torch.full_like(off[:, 0], off.shape[1]), off.sum(1), off.square().sum(1)]))

        fine = []
        for number in own(pairs.batches):
            pairs.norm(name, number, take)
            fine.append(sums.isfinite().all())
        self._check_finite(name, pairs, fine)
        count, first, second = totals("batch norm", [sums])[0] if is_dealt(pairs.batches) else sums
        if bool((count >= 2).all()):
            mean.add_((first / count).to(mean))
            var.copy_((second - first.square() / count) / (count - 1))

    def _check_finite(self, name: str, pairs: Pairs, fine: Sequence[Tensor]) -> None:
        """Refuse statistics that are no numbers, and say from which batch on; the device is asked once."""
        wrong = (~torch.stack(list(fine))).nonzero().flatten().tolist() if fine else []
        if wrong:
            where = f"{type(self._recipe).__name__}: {batch_name(own(pairs.batches)[wrong[0]])}"
            raise CalibrationError(f"{where}: what is normalised with {name} is not finite; are the weights?")

    # one layer -------------------------------------------------------------------------------------------------

    def _take(self, moments: Moments, both: Both, shares: int, number: int, known: dict[Any, Tensor]) -> None:
        """Take in what one batch gives to the cut product, and what should come out.

        `known` are the second moments of the rows that other products have read of the same batch.
        """
        whole, cut = both.whole.product, both.cut.product
        assert both.whole.out is not None
        if not cut.narrow or whole.of.places != cut.of.places:
            return
        sample = whole.of.sample(-(-_ROWS * whole.enough // shares), number)
        pick = _picked(whole, self.kept.get(whole.name, {}))
        gap = self._gap(both, pick)
        missing = None if gap is None else cut.of.outputs(gap, sample)
        groups, outputs = cut.weight.shape[:2]
        for x, out in zip(cut.of.rows(sample), whole.of.outputs(both.whole.out, sample), strict=True):
            y = out if pick is None else _regrouped(out, pick, groups, outputs)
            same = (x.data_ptr(), x.shape, x.stride()) if storage_id(x) == storage_id(cut.of.data) else None
            if same is not None and same not in known:
                known[same] = squared(x)
            moments.add(x, y if missing is None else y + next(missing), known.get(same))

    def _gap(self, both: Both, pick: Tensor | None) -> Tensor | None:
        """What the stream that a product is added to lacks in the cut model, in the units and shape of its output."""
        residual = self._found[1].residuals.get(both.cut.product.name)
        stream, left, out = both.whole.stream, both.cut.stream, both.whole.out
        if residual is None or stream is None or left is None or out is None or stream.numel() != out.numel():
            return None
        stream = stream.reshape(out.shape)
        stream = stream if pick is None else stream.index_select(1, pick.to(stream.device))
        if stream.numel() != left.numel():
            return None
        scale = self._scale(residual)
        shape = [-1 if d == 1 else 1 for d in range(stream.ndim)]
        return (stream - left.reshape(stream.shape)) / scale.to(stream).view(shape if scale.ndim else ())

    def _scale(self, residual: Residual) -> Tensor:
        """What an output is multiplied with before it is added to the stream; infinite where that is next to zero."""
        scale = torch.ones((), dtype=torch.float64)
        if residual.norm is not None:
            scale = scale * self._norm_scale(residual.norm)
        for name in residual.scales:
            scale = scale * self.tensors[name].detach().double()
        return torch.where(scale.abs() < _FAINT, torch.inf, scale)

    def _norm_scale(self, norm: Norm) -> Tensor:
        one = torch.ones((), dtype=torch.float64)
        weight = one if norm.weight is None else self.tensors[norm.weight].detach().double()
        var = one if norm.var is None else self.tensors[norm.var].double()
        return weight / (var + norm.eps).sqrt()

    def solve(self, found: Sequence[tuple[ParameterProduct | Slot, Folds]], dealt: bool) -> None:
        """Put the weight and shift into products of the cut model that fit best, if they are better than their own.

        Where the data are dealt to ranks, each rank solves for some of them, and tells the others.
        """
        if dealt:
            sums = [each for _, folds in found for part in folds.parts for each in part.sums]
            every = iter(totals("compensation: moments", sums))
            found = [(product, Folds.of_sums(self._held, every)) for product, _ in found]
        made = {
            number: self._solution(folds, product)
            for number, (product, folds) in enumerate(found)
            if not dealt or number % ranks() == dist.get_rank()
        }
        made = pooled("compensation: weights", made) if dealt else made
        for number, (product, _) in enumerate(found):
            self._met.add(product.name)
            if (solution := made[number]) is not None:
                before, after, note, weight, shift = solution
                self._layers[product.part] = LayerFit(product.name, before, after, note)
                if not note:
                    self._write(product, weight, shift)

    def _solution(self, folds: Folds, product: ParameterProduct | Slot) -> Solution | None:
        """The weight and shift that fit best; None where a layer is not off."""
        moments = folds.judge
        if not moments.rows:
            wide = isinstance(product, ParameterProduct) and not product.narrow
            why = "too wide to be refitted" if wide else "not refitted: its inputs lost rows, not only summed positions"
            return float("nan"), float("nan"), why, None, None
        bias, start = product.shift, product.weight.to(moments.xx.device)
        free = self._recipe.shifts and (bias is not None or self._norm_behind(product) is not None)
        old = None if bias is None else bias.squeeze(1).to(moments.xx)
        before = moments.error(start, old)
        scale = folds.scale
        off = float(before.sum()) / scale
        if not math.isfinite(off):
            return float("nan"), float("nan"), "left as it was: what it reads or puts out is not finite", None, None
        if off < _NOTHING:
            return None
        weight, shift = start.double(), folds.fit.shift(start) if free else torch.zeros_like(before)
        if self._recipe.weights:
            weight, shift = fitted(folds, start, self._recipe.ridge, free)
        elif not free:
            return None
        weight = weight.to(start.dtype)
        after = moments.error(weight, shift if free else old)
        if not float(after.sum()) < float(before.sum()):
            return off, off, "left as it was: no fit does better", None, None
        kept = weight if self._recipe.weights else None
        return off, float(after.sum()) / scale, "", kept, shift if free else None

    def _norm_behind(self, product: ParameterProduct | Slot) -> Norm | None:
        """The norm that takes the shift of a product."""
        norm = self._found[1].norms.get(product.name) if product.name in self.stops else None
        if norm is not None and self._found[1].means[norm.mean] > 1:
            return None  # other layers go through it too: it cannot take the shift of one
        return norm

    def _write(self, product: ParameterProduct | Slot, weight: Tensor | None, shift: Tensor | None) -> None:
        if weight is not None:
            product.write(weight)
        if shift is None:
            return
        norm = self._norm_behind(product)
        if product.shift is not None:
            product.write_shift(shift)
        elif norm is not None:
            mean = self.tensors[norm.mean]
            mean.sub_(shift.flatten().to(mean))
            self._shifted.add(norm.mean)

    # what was reached ------------------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[LayerFit, ...]:
        """Each layer that was met and was off."""
        return tuple(self._layers.values())

    def notes(self, plan: Plan) -> Iterator[str]:
        """What was cut and is multiplied with data, but was not refitted."""
        found = self._found[0]
        for name in plan.kept if self._recipe.weights else ():
            if name in found.derived:
                yield f"{name} was not refitted: data are multiplied with what is made of it, not with itself"
            elif name in found.products and name not in self._met:
                yield f"{name} was not refitted: it is used in more than one place"


def _picked(whole: ParameterProduct, kept: Mapping[int, Tensor]) -> Tensor | None:
    """Which outputs of a full-size product (over all groups) its cut one has; None: all."""
    if not kept:
        return None
    picked = stays(whole, kept).any(2).flatten()
    return None if bool(picked.all()) else picked.nonzero().flatten()


def _regrouped(out: Tensor, pick: Tensor, groups: int, outputs: int) -> Tensor:
    """Picked columns of (groups, rows, outputs), in the groups of the cut product."""
    flat = out.transpose(0, 1).flatten(1).index_select(1, pick.to(out.device))
    return flat.unflatten(1, (groups, outputs)).transpose(0, 1)


def repeated(
    whole: nn.Module,
    tensors: Mapping[str, Tensor],
    kept: KeptTensors,
    batches: Sequence[Any],
    held: frozenset[int],
    names: Counter[str],
) -> list[tuple[Slot, Folds]]:
    """Each part of the parameters that goes into products, and what its inputs and outputs should be.

    `tensors` are those of the cut model, `kept` what it has of each, `names` says how often each parameter is used in a
    run. The inputs are those of the full-size model, as far as they are kept. What is fed with its own results would,
    fitted to what it is fed with, follow its errors: each fit changes the very data that it was made for.
    """
    found: dict[Part, tuple[Slot, Folds]] = {}
    number = 0

    def take(product: ParameterProduct, run: Any) -> Any:
        out = run()
        if product.name in names and product.of.groups == 1 and product.narrow and _separable(product):
            if product.part not in found:
                found[product.part] = Slot.of(product, tensors, kept), Folds(held)
            slot, folds = found[product.part]
            sample = product.of.sample(-(-product.enough // (len(batches) * names[product.name])), number)
            for x, y in zip(product.of.rows(sample), product.of.outputs(out, sample), strict=True):
                folds.of(number).add(x[..., slot.inputs.to(x.device)], y[..., slot.outputs.to(y.device)])
        return out

    for number in own(batches) if names else ():
        with blamed_on_batch(number, "compensation"), Watch(whole, take):
            call(whole, batches[number])
    if is_dealt(batches) and names:  # to some parts only some ranks may have come
        told = pooled("compensation: parts", {part: slot.told for part, (slot, _) in found.items()})
        found = {part: found.get(part) or (Slot(tensors, *about), Folds(held)) for part, about in told.items()}
    return list(found.values())


class Slot:
    """Where a product of the full-size model has its weight and its bias in the tensors of the cut one."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        part: Part,
        bias: str | None,
        inputs: Tensor,
        outputs: Tensor,
        at: Sequence[Tensor],
        shifts: Tensor,
    ) -> None:
        self.name, self.part, self.bias = part[0], part, bias
        self.inputs, self.outputs = inputs, outputs
        self._at, self._shifts = tuple(at), shifts
        self._weight = tensors[self.name]
        self._bias = None if bias is None else tensors[bias]

    @staticmethod
    def of(product: ParameterProduct, tensors: Mapping[str, Tensor], kept: KeptTensors) -> Slot:
        """That of a product."""
        mine = kept.get(product.name, {})
        left = stays(product, mine)[0]
        inputs, outputs = (left.any(dim).nonzero().flatten() for dim in (0, 1))

        def picked(dim: int) -> Tensor:  # the index in a dimension of the cut tensor at each element that is left
            index = product.index.get(dim, torch.zeros(1, 1, 1, dtype=torch.long))[0]
            index = index[outputs] if index.shape[0] > 1 else index
            return _among(mine.get(dim), index[:, inputs] if index.shape[1] > 1 else index)

        at = [picked(dim) for dim in range(tensors[product.name].ndim)]
        bias, shifts = None, outputs
        if product.bias is not None and product.shift is not None:
            bias = product.bias
            start = int(product.shift.storage_offset())
            shifts = _among(kept.get(bias, {}).get(0), start + outputs)
        return Slot(tensors, product.part, bias, inputs, outputs, at, shifts)

    @property
    def told(self) -> tuple[Any, ...]:
        """What it was made of besides the tensors, to tell other ranks."""
        return self.part, self.bias, self.inputs, self.outputs, list(self._at), self._shifts

    @property
    def weight(self) -> Tensor:
        """As (1, outputs, summed)."""
        shape = (len(self.outputs), len(self.inputs))
        return self._weight.detach()[self._device(self._at)].expand(shape).unsqueeze(0)

    @property
    def shift(self) -> Tensor | None:
        """The bias as (1, 1, outputs)."""
        return None if self._bias is None else self._bias.detach()[self._device((self._shifts,))].view(1, 1, -1)

    def write(self, weight: Tensor) -> None:
        self._weight[self._device(self._at)] = weight[0].to(self._weight)

    def write_shift(self, shift: Tensor) -> None:
        assert self._bias is not None
        self._bias[self._device((self._shifts,))] = shift.flatten().to(self._bias)

    def _device(self, at: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(index.to(self._weight.device) for index in at)


def _separable(product: ParameterProduct) -> bool:
    """Whether each dimension of the parameter belongs to the outputs or to what is summed, and none to both."""
    return all(min(index.shape[1:]) == 1 for index in product.index.values())


def stays(product: ParameterProduct, kept: Mapping[int, Tensor]) -> Tensor:
    """(groups, outputs, summed): which elements of a full-size product's weight its cut one has."""
    found = torch.ones(1, 1, 1, dtype=torch.bool)
    for dim, index in product.index.items():
        if dim in kept:
            found = found & torch.isin(index, kept[dim])
    return found.expand(product.weight.shape)


def _among(kept: Tensor | None, index: Tensor) -> Tensor:
    """Where kept indices are after the cut."""
    return index if kept is None else torch.searchsorted(kept, index)
