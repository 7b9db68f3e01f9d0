"""The products of a model with its parameters: what they read, and how much what they make matters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import Product, Watch, call, stakes
from secateur.errors import CalibrationError, SecateurWarning
from secateur.importance.batches import failed, studied

_DOUBLE = 2**10  # summed elements up to which the inverse is in double precision
_HELD = 2**31  # bytes of second moments at a time


def _zero() -> Tensor:
    return torch.zeros(1, 1, dtype=torch.float64)


@dataclass(eq=False)
class Reader:
    """A product that reads positions: the second moments of its inputs, and how much each output matters."""

    name: str
    weight: Tensor  # (groups, outputs, summed)
    index: Mapping[int, Tensor]
    narrow: bool = True  # whether it has all second moments of its inputs, not only their squares
    rows: int = 0
    xx: Tensor = field(default_factory=_zero)  # (groups, summed, summed); too wide: (groups, summed)
    x: Tensor = field(default_factory=_zero)  # (groups, summed)
    stakes: Tensor = field(default_factory=_zero)  # (groups, outputs); zero where nothing tells

    def add(self, x: Tensor) -> None:
        """Take in inputs as (groups, rows, summed)."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        self.rows += x.shape[1]
        self.xx = self.xx + (x.mT @ x if self.narrow else x.square().sum(1)).cpu()
        self.x = self.x + x.sum(1).cpu()

    def summed(self, dim: int) -> Tensor | None:
        """(groups, summed): the index in a dimension of the parameter at each summed element, if that varies."""
        index = self.index.get(dim)
        if index is None or index.shape[1] != 1 or index.shape[2] == 1:
            return None
        return index[:, 0].expand(self.weight.shape[0], -1)

    def made(self, dim: int) -> Tensor | None:
        """(groups, outputs): the index in a dimension of the parameter at each output, if that varies."""
        index = self.index.get(dim)
        if index is None or index.shape[2] != 1:
            return None
        return index[:, :, 0].expand(self.weight.shape[:2])

    def covariance(self) -> Tensor:
        """Of the inputs."""
        mean = self.x / self.rows
        return self.xx / self.rows - (mean.unsqueeze(2) * mean.unsqueeze(1) if self.narrow else mean.square())

    def columns(self) -> Tensor:
        """(groups, summed): how much of the model's output goes with the variation of each input by itself."""
        spread = self.covariance()
        spread = spread.diagonal(dim1=1, dim2=2) if self.narrow else spread
        return self.weighted().square().sum(1) * spread

    def effects(self) -> Tensor:
        """(groups, outputs): how much of the model's output goes with the variation of each output."""
        weight, spread = self.weighted(), self.covariance()
        return ((weight @ spread if self.narrow else weight * spread.unsqueeze(1)) * weight).sum(2)

    def inverse(self, ridge: float) -> Tensor:
        """The inverse of the inputs' covariance (a shift is free), held away from singular by `ridge`."""
        covariance = self.covariance()
        if covariance.shape[-1] > _DOUBLE:
            covariance = covariance.float()
        diagonal = covariance.diagonal(dim1=1, dim2=2)
        pull = (ridge * diagonal.mean(1, keepdim=True)).clamp_min(1e-12)
        while True:
            factor, failing = torch.linalg.cholesky_ex(covariance + torch.diag_embed(pull.expand_as(diagonal)))
            if not failing.any():
                return torch.cholesky_inverse(factor)
            pull = pull * 10  # rounding made it singular

    def weighted(self) -> Tensor:
        """The weight, each output by how much it matters."""
        return self.weight.double() * self.stakes.sqrt().unsqueeze(-1)


class Readers:
    """The products of a model by parameter, with the moments of their inputs over all batches.

    Of the moments only so many are held at a time as memory allows: those that are asked for, and those that will be
    next. What is not held any more is gone, and asked for again it takes another pass over the batches.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self._model, self._batches = model, batches
        self._held: dict[str, list[Reader]] = {}

    def of(self, names: set[str], following: Iterable[str] = ()) -> Mapping[str, list[Reader]]:
        """The products with parameters, of which `following` may be asked for later."""
        if not names <= self._held.keys():
            self._held = {}
            self._held = self._pass(self._chosen(names, following))
        return self._held

    def _chosen(self, names: set[str], following: Iterable[str]) -> set[str]:
        """As many parameters as fit, at least those that are asked for."""
        chosen, size = set(names), sum(self._sizes.get(name, 0) for name in names)
        for name in following:
            if name not in chosen:
                size += self._sizes.get(name, 0)
                if size > _HELD:
                    break
                chosen.add(name)
        return chosen

    @cached_property
    def _stakes(self) -> dict[tuple[str, int], Tensor] | None:
        with studied(self._model, "Reconstruction"):
            try:
                return stakes(self._model, self._batches)
            except Exception as error:  # any code of the user's may run here
                warnings.warn(
                    f"Reconstruction: the model cannot be differentiated, so each layer counts the same, whatever its "
                    f"part in the output ({type(error).__name__}: {error})",
                    SecateurWarning,
                    stacklevel=2,
                )
                return None

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """The bytes of the moments of each parameter's products."""
        found: dict[tuple[str, int], int] = {}

        def on_product(product: Product, _: int) -> None:
            groups, summed = product.weight.shape[::2]
            found[product.part] = groups * summed**2 * 8

        self._run(on_product, self._batches[:1])
        sizes: dict[str, int] = {}
        for (name, _), size in found.items():
            sizes[name] = sizes.get(name, 0) + size
        return sizes

    def _pass(self, names: set[str]) -> dict[str, list[Reader]]:
        """Run all batches and take in what products with some parameters read."""
        found: dict[str, dict[int, Reader]] = {name: {} for name in names}

        def on_product(product: Product, number: int) -> None:
            if product.name not in found:
                return
            known, key = found[product.name], product.part[1]
            if key not in known:
                known[key] = Reader(product.name, product.weight.detach().cpu(), product.index, product.narrow)
            for rows in product.rows(product.sample(-(-product.enough // len(self._batches)), number)):
                known[key].add(rows)

        self._run(on_product, self._batches)
        for name, parts in found.items():
            for offset, reader in parts.items():
                if not bool(reader.xx.isfinite().all()):
                    raise CalibrationError(
                        f"Reconstruction: what {name} is multiplied with is not finite; are there NaN weights or data?"
                    )
                reader.stakes = self._stake(reader, offset)
        return {name: list(parts.values()) for name, parts in found.items()}

    def _stake(self, reader: Reader, offset: int) -> Tensor:
        """How much each output matters: to the model's, or else to all outputs of the layer."""
        if self._stakes is None:
            even = replace(reader, stakes=torch.ones(reader.weight.shape[:2], dtype=torch.float64))
            return even.stakes / even.effects().sum().clamp_min(1e-30)
        own = self._stakes.get((reader.name, offset))
        return reader.stakes if own is None or own.shape != reader.weight.shape[:2] else own

    def _run(self, on_product: Callable[[Product, int], None], batches: Sequence[Any]) -> None:
        """All products in runs of the model, with the number of the batch."""
        with studied(self._model, "Reconstruction"):
            for number, batch in enumerate(batches):

                def seen(product: Product, run: Any, number: int = number) -> Any:
                    on_product(product, number)
                    return run()

                try:
                    with Watch(self._model, seen):
                        call(self._model, batch)
                except Exception as error:  # any code of the user's may run here
                    raise failed("Reconstruction", number, "model(batch)", error) from error
