"""What the layers that read a position lose when it goes and the others take over for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import Product, Watch, call, stakes
from secateur.errors import CalibrationError
from secateur.importance.batches import each, failed, studied
from secateur.importance.criterion import Criterion
from secateur.importance.elimination import Part, eliminate
from secateur.importance.gather import Context

_UNKNOWN = 1e30  # the score where nothing can be told: such an axis is the last to be cut


@dataclass(frozen=True, eq=False)
class Reconstruction(Criterion):
    """The error that is left in the model's output when a position goes and the rest makes up for it.

    >>> import secateur as sec
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> net[0].weight.data[2] = net[0].weight.data[1]  # whatever the third can do, the second can
    >>> criterion = sec.Reconstruction([torch.randn(64, 4)])
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> sorted({0, 1, 2} - set(sec.plan(graph, sec.Ratio(0.4), importance=criterion).axes[0].keep))[0] > 0
    True

    Positions go one after the other, the one that costs least first; a score is what the error grows by. What a layer
    that reads the position loses is the part of it that a least-squares fit of the others cannot express; how much
    that matters is the squared derivative of the model's output (for the logits of a classifier: the Fisher
    information of its answer; no labels are needed). Scores are in the same unit everywhere, so a budget is spent
    where it costs least. Best together with `LeastSquares`, which carries out the fit.
    """

    batches: Any
    ridge: float = 1e-3

    comparable = True

    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""
        key = (self, "readers")
        if key not in context.memo:
            context.memo[key] = readers(context.model, list(each(self.batches, "Reconstruction")))
        found = context.memo[key]
        parts = []
        for site, _ in context.sites():
            for reader in found.get(site.tensor, ()):
                index = reader.summed(site.dim)
                if index is not None:
                    owners = context.owners(site.tensor, site.dim)
                    parts += [Part(reader.inverse(self.ridge), reader.weighted(), owner[index]) for owner in owners]
        return eliminate(parts, context.axis.size) if parts else _unread(context, found)


def _unread(context: Context, found: Mapping[str, Sequence[Reader]]) -> Tensor:
    """Scores where nothing but other data reads an axis: how much the output varies with what makes a position."""
    total = torch.zeros(context.axis.size, dtype=torch.float64)
    seen = False
    for site, _ in context.sites():
        for reader in found.get(site.tensor, ()):
            index = reader.made(site.dim)
            for owner in context.owners(site.tensor, site.dim) if index is not None else ():
                position = owner[index].flatten()
                total.index_add_(0, position[position >= 0], reader.effects().flatten()[position >= 0])
                seen = True
    return total if seen else torch.full_like(total, _UNKNOWN)


@dataclass(eq=False)
class Reader:
    """A product that reads positions: the second moments of its inputs, and how much each output matters."""

    weight: Tensor  # (groups, outputs, summed)
    index: Mapping[int, Tensor]
    xx: Tensor  # (groups, summed, summed)
    x: Tensor  # (groups, summed)
    rows: int = 0
    stakes: Tensor | None = None  # (groups, outputs)

    def add(self, x: Tensor) -> None:
        """Take in inputs as (groups, rows, summed)."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        self.rows += x.shape[1]
        self.xx = self.xx + (x.mT @ x).cpu()
        self.x = self.x + (x.new_ones(1, x.shape[1]) @ x).squeeze(1).cpu()

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
        return self.xx / self.rows - self.x.unsqueeze(2) * self.x.unsqueeze(1) / self.rows**2

    def effects(self) -> Tensor:
        """(groups, outputs): how much of the model's output goes with the variation of each output."""
        weight = self.weighted()
        return ((weight @ self.covariance()) * weight).sum(2)

    def inverse(self, ridge: float) -> Tensor:
        """The inverse of the inputs' covariance (a shift is free), held away from singular by `ridge`."""
        covariance = self.covariance()
        diagonal = covariance.diagonal(dim1=1, dim2=2)
        pull = (ridge * diagonal.mean(1, keepdim=True)).clamp_min(1e-12)
        while True:
            factor, failing = torch.linalg.cholesky_ex(covariance + torch.diag_embed(pull.expand_as(diagonal)))
            if not failing.any():
                return torch.cholesky_inverse(factor)
            pull = pull * 10  # rounding made it singular

    def weighted(self) -> Tensor:
        """The weight, each output by how much it matters."""
        if self.stakes is None:
            return self.weight.double()
        return self.weight.double() * self.stakes.sqrt().unsqueeze(2)


def readers(model: nn.Module, batches: Sequence[Any]) -> dict[str, list[Reader]]:
    """The products of a model by parameter, with the moments of their inputs over all batches."""
    found: dict[str, dict[int, Reader]] = {}
    number = 0

    def on_product(product: Product, run: Any) -> Any:
        weight = product.weight.detach().cpu()
        key = int(product.weight.storage_offset())  # a packed parameter is read part by part
        known = found.setdefault(product.name, {})
        if key not in known:
            zeros = torch.zeros(1, 1, 1, dtype=torch.float64)
            known[key] = Reader(weight, product.index, zeros, zeros[0])
        for rows in product.rows(product.sample(-(-product.enough // len(batches)), number)):
            known[key].add(rows)
        return run()

    with studied(model, "Reconstruction"):
        for batch in batches:
            try:
                with Watch(model, on_product):
                    call(model, batch)
            except Exception as error:  # any code of the user's may run here
                raise failed("Reconstruction", number, "model(batch)", error) from error
            number += 1
        if any(not bool(reader.xx.isfinite().all()) for parts in found.values() for reader in parts.values()):
            raise CalibrationError("Reconstruction: inputs of layers are not finite; are there NaN weights or data?")
        matter = stakes(model, batches)
    for name, parts in found.items():
        for offset, reader in parts.items():
            own = matter.get((name, offset))
            fits = own is not None and own.shape == reader.weight.shape[:2]
            reader.stakes = own if fits else torch.zeros(reader.weight.shape[:2], dtype=torch.float64)
    return {name: list(parts.values()) for name, parts in found.items()}
