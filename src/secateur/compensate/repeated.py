"""Parameters that a run uses more than once, such as the recurrence of an RNN, fitted to the full-size model alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import Product, Watch, call
from secateur.compensate.moments import Moments
from secateur.plan.plan import Plan

Part = tuple[str, int]  # a parameter, and where in its storage what is multiplied with data begins


def repeated(
    whole: nn.Module, cut: nn.Module, plan: Plan, batches: Sequence[Any], names: Collection[str]
) -> Iterator[tuple[Product, Moments]]:
    """Each product of the cut model with one of the parameters, and what its inputs and outputs should be.

    The inputs are those of the full-size model, as far as they are kept. What is fed with its own results would, fitted
    to what it is fed with, follow its errors: each fit changes the very data that it was made for.
    """
    if not names:
        return
    first = _First(cut, batches[0], names)
    kept = {name: {d: torch.as_tensor(k) for d, k in dims.items()} for name, dims in plan.kept.items()}
    moments: dict[Part, Moments] = {}
    number = 0

    def take(product: Product, run: Any) -> Any:
        out = run()
        if product.name in names and product.groups == 1:
            own = moments.setdefault(product.part, Moments())
            sample = product.sample(-(-product.enough // (len(batches) * first.uses[product.name])), number)
            inputs, outputs = _stay(product, kept.get(product.name, {}))
            for x, y in zip(product.rows(sample), product.outputs(out, sample), strict=True):
                own.add(x[..., inputs.to(x.device)], y[..., outputs.to(y.device)])
        return out

    for number, batch in enumerate(batches):  # noqa: B007  (`take` reads it)
        with Watch(whole, take):
            call(whole, batch)
    for part, product in zip(sorted(moments), first.products, strict=True):
        if product.weight.shape[1:] == (moments[part].xy.shape[2], moments[part].xx.shape[2]):
            yield product, moments[part]


class _First:
    """A run of a model: its products with some parameters, each part of a parameter once, and how often each is used.

    Cutting keeps the order of the parts.
    """

    def __init__(self, model: nn.Module, batch: Any, names: Collection[str]) -> None:
        self._names = names
        self._found: dict[Part, Product] = {}
        self.uses: Counter[str] = Counter()
        with Watch(model, self._note):
            call(model, batch)

    def _note(self, product: Product, run: Any) -> Any:
        if product.name in self._names and product.groups == 1:
            self._found.setdefault(product.part, product)
            self.uses[product.name] += 1
        return run()

    @property
    def products(self) -> list[Product]:
        """In the order of their parts."""
        return [self._found[part] for part in sorted(self._found)]


def _stay(product: Product, kept: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Which of the summed elements and which of the outputs of a full-size product its cut one has."""
    stays = torch.ones(1, 1, 1, dtype=torch.bool)
    for dim, index in product.index.items():
        if dim in kept:
            stays = stays & torch.isin(index, kept[dim])
    stays = stays.expand(product.weight.shape)[0]
    return stays.any(0).nonzero().flatten(), stays.any(1).nonzero().flatten()
