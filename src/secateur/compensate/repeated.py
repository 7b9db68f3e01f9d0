"""Parameters that a run uses more than once, such as the recurrence of an RNN, fitted to the full-size model alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import Product, Watch, call
from secateur.compensate.moments import Moments

Part = tuple[str, int]  # a parameter, and where in its storage what is multiplied with data begins
Kept = Mapping[str, Mapping[int, Tensor]]


def repeated(
    whole: nn.Module, tensors: Mapping[str, Tensor], kept: Kept, batches: Sequence[Any], names: Counter[str]
) -> Iterator[tuple[Slot, tuple[Moments, Moments]]]:
    """Each part of the parameters that goes into products, and what its inputs and outputs should be.

    `tensors` are those of the cut model, `kept` what it has of each, `names` says how often each parameter is used in a
    run. The inputs are those of the full-size model, as far as they are kept. What is fed with its own results would,
    fitted to what it is fed with, follow its errors: each fit changes the very data that it was made for.
    """
    found: dict[Part, tuple[Slot, tuple[Moments, Moments]]] = {}
    number = 0

    def take(product: Product, run: Any) -> Any:
        out = run()
        if product.name in names and product.groups == 1 and product.narrow and _separable(product):
            if product.part not in found:
                found[product.part] = Slot(product, tensors, kept), (Moments(), Moments())
            slot, folds = found[product.part]
            sample = product.sample(-(-product.enough // (len(batches) * names[product.name])), number)
            for x, y in zip(product.rows(sample), product.outputs(out, sample), strict=True):
                folds[number % 2].add(x[..., slot.inputs.to(x.device)], y[..., slot.outputs.to(y.device)])
        return out

    for number, batch in enumerate(batches if names else ()):  # noqa: B007  (`take` reads it)
        with Watch(whole, take):
            call(whole, batch)
    yield from found.values()


class Slot:
    """Where a product of the full-size model has its weight and its bias in the tensors of the cut one."""

    def __init__(self, product: Product, tensors: Mapping[str, Tensor], kept: Kept) -> None:
        self.name, self.part, self.bias = product.name, product.part, product.bias
        self._weight = tensors[product.name]
        mine = kept.get(product.name, {})
        left = stays(product, mine)[0]
        self.inputs, self.outputs = (left.any(dim).nonzero().flatten() for dim in (0, 1))
        self._at = tuple(self._picked(product, mine, dim) for dim in range(self._weight.ndim))
        self._bias, self._shifts = None, self.outputs
        if product.bias is not None and product.shift is not None:
            self._bias = tensors[product.bias]
            start = int(product.shift.storage_offset())
            self._shifts = _among(kept.get(product.bias, {}).get(0), start + self.outputs)

    def _picked(self, product: Product, kept: Mapping[int, Tensor], dim: int) -> Tensor:
        """The index in a dimension of the cut tensor at each output and summed element that is left."""
        index = product.index.get(dim, torch.zeros(1, 1, 1, dtype=torch.long))[0]
        index = index[self.outputs] if index.shape[0] > 1 else index
        return _among(kept.get(dim), index[:, self.inputs] if index.shape[1] > 1 else index)

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
        """Put values into the weight."""
        self._weight[self._device(self._at)] = weight[0].to(self._weight)

    def write_shift(self, shift: Tensor) -> None:
        """Put values into the bias."""
        assert self._bias is not None
        self._bias[self._device((self._shifts,))] = shift.flatten().to(self._bias)

    def _device(self, at: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(index.to(self._weight.device) for index in at)


def _separable(product: Product) -> bool:
    """Whether each dimension of the parameter belongs to the outputs or to what is summed, and none to both."""
    return all(min(index.shape[1:]) == 1 for index in product.index.values())


def stays(product: Product, kept: Mapping[int, Tensor]) -> Tensor:
    """(groups, outputs, summed): which elements of a full-size product's weight its cut one has."""
    found = torch.ones(1, 1, 1, dtype=torch.bool)
    for dim, index in product.index.items():
        if dim in kept:
            found = found & torch.isin(index, kept[dim])
    return found.expand(product.weight.shape)


def _among(kept: Tensor | None, index: Tensor) -> Tensor:
    """Where kept indices are after the cut."""
    return index if kept is None else torch.searchsorted(kept, index)
