"""How large the data are that products with parameters read and make, over all batches."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from secateur.calibrate import Product, Watch, call
from secateur.errors import CalibrationError, SecateurError, SecateurWarning
from secateur.importance.batches import each, failed, studied
from secateur.importance.gather import Context, Importance

aten = torch.ops.aten

_CHUNK = 2**22  # elements that are squared at a time


@dataclass
class Reading:
    """The mean squares of what `out[n, g, o] = Σ_k inputs[n, g, k] · weight[g, o, k]` read and made so far.

    `index` says for each dimension of the parameter at which of its indices an element of the weight is.
    """

    weight: Tensor
    index: Mapping[int, Tensor]
    squares_in: Tensor  # (groups, summed)
    squares_out: Tensor  # (groups, outputs)
    rows: int = 0

    @staticmethod
    def of(product: Product) -> Reading:
        """A reading of nothing yet."""
        weight = product.weight.detach()
        groups, outputs, summed = weight.shape
        zeros = torch.zeros(groups, outputs + summed, dtype=torch.float64)
        return Reading(weight, product.index, *(part.clone() for part in zeros.split([summed, outputs], 1)))

    def add(self, product: Product, out: Tensor) -> None:
        """Count what one product read and made. Sums over the batch come first, as rows are many times larger."""
        at = 1 if product.op is aten.addmm.default else 0
        folded = replace(product, args=(*product.args[:at], _squares(product.data), *product.args[at + 1 :]))
        every = folded.sample(sys.maxsize)
        for part in folded.rows(every):
            self.squares_in += part.sum(1)
            self.rows += part.shape[1] * len(product.data)
        for part in folded.outputs(_squares(out), every):
            self.squares_out += part.sum(1)

    @property
    def inputs(self) -> Tensor:
        """(groups, summed): the mean square of each input."""
        return self.squares_in / self.rows

    @property
    def outputs(self) -> Tensor:
        """(groups, outputs): the mean square of each output."""
        return self.squares_out / self.rows


Readings = Mapping[int, list[Reading]]  # by the id of the parameter; one for each of its parts that is used by itself


def _squares(data: Tensor) -> Tensor:
    """Σ x² over the first dimension, which stays, with one entry; some at a time."""
    total = torch.zeros(1, *data.shape[1:], dtype=torch.float64, device=data.device)
    for part in data.split(max(1, _CHUNK * len(data) // max(1, data.numel()))):
        total += part.to(torch.promote_types(part.dtype, torch.float32)).square().sum(0, dtype=torch.float64)
    return total.cpu()


def readings(context: Context, batches: Any, what: str) -> Readings:
    """What every product with a parameter read and made over all batches; run once for all axes of a plan."""
    key = ("readings", id(batches))
    if key not in context.memo:
        context.memo[key] = batches, _watched(context, batches, what)  # with the batches, so that their id stays theirs
    return context.memo[key][1]


def _watched(context: Context, batches: Any, what: str) -> Readings:
    model = context.model
    found: dict[int, dict[Any, Reading]] = {}

    def note(product: Product, run: Any) -> Any:
        out = run()
        view = product.args[2 if product.op is aten.addmm.default else 1]
        which = (product.op, view.storage_offset(), tuple(view.shape), view.stride(), product.groups)
        parts = found.setdefault(id(watch.parameters.tensors[product.name]), {})
        if which not in parts:
            parts[which] = Reading.of(product)
        parts[which].add(product, out)
        return out

    watch = Watch(model, note)
    with studied(model, what):
        for number, batch in enumerate(each(batches, what), start=1):
            try:
                with watch:
                    call(model, batch)
            except SecateurError:
                raise
            except Exception as error:  # any code of the user's may run here
                raise failed(what, number, "model(batch)", error) from error
            _check(found.values(), f"{what}: batch {number}")
    return {parameter: list(parts.values()) for parameter, parts in found.items()}


def _check(found: Iterable[Mapping[Any, Reading]], where: str) -> None:
    for parts in found:
        for reading in parts.values():
            if not (reading.squares_in.isfinite().all() and reading.squares_out.isfinite().all()):
                raise CalibrationError(
                    f"{where}: what the model computes is not finite: is the batch, are the weights?"
                )


def instead(context: Context, what: str, criterion: Importance) -> Tensor:
    """The scores of an axis that no product with a parameter reads or makes, by another criterion; with a warning."""
    if any(context.sites()):
        warnings.warn(
            f"{what}: {context.axis.name} is scored by {criterion!r}: no product with a parameter reads or makes it",
            SecateurWarning,
            stacklevel=2,
        )
    return criterion(context)
