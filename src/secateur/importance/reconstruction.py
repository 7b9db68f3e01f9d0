"""What the layers that read a position lose when it goes and the others take over for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.importance.batches import each
from secateur.importance.criterion import Criterion
from secateur.importance.elimination import Alone, Eliminated, Part, eliminate
from secateur.importance.gather import Context
from secateur.importance.readers import Reader, Readers

_UNKNOWN = 1e30  # the score where nothing can be told: such an axis is the last to be cut


@dataclass(frozen=True, eq=False)
class Reconstruction(Criterion):
    """The error that is left in the model's output when a position goes and the rest makes up for it.

    >>> import secateur as sec
    >>> from torch import nn
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
            context.memo[key] = Readers(context.model, list(each(self.batches, "Reconstruction")))
        found = list(_readers(context.memo[key], context))
        parts = [part for reader, dim in found for part in self._parts(reader, context, dim)]
        return eliminate(parts, context.axis.size) if parts else _unread(found, context)

    def _parts(self, reader: Reader, context: Context, dim: int) -> Iterator[Eliminated]:
        """What a product that reads the axis loses, for each place of the axis in what it sums over."""
        index = reader.summed(dim)
        owners = [] if index is None else [owner[index] for owner in context.owners(reader.name, dim)]
        if owners and reader.narrow:
            inverse, weight = reader.inverse(self.ridge), reader.weighted()
            yield from (Part(*group) for owner in owners for group in zip(inverse, weight, owner, strict=True))
        elif owners:
            yield from (Alone(reader.columns(), owner) for owner in owners)


def _readers(known: Readers, context: Context) -> Iterator[tuple[Reader, int]]:
    """The products with parameters that the axis is part of, and the dimension that it is in."""
    sites = [site for site, _ in context.sites()]
    axes = context.graph.axes
    at = next((i for i, axis in enumerate(axes) if axis is context.axis), 0)
    following = (site.tensor for axis in axes[at:] for site in axis.sites)
    found = known.of({site.tensor for site in sites}, following)
    return ((reader, site.dim) for site in sites for reader in found.get(site.tensor, ()))


def _unread(found: list[tuple[Reader, int]], context: Context) -> Tensor:
    """Scores where nothing but other data reads an axis: how much the output varies with what makes a position."""
    total = torch.zeros(context.axis.size, dtype=torch.float64)
    seen = False
    for reader, dim in found:
        index = reader.made(dim)
        for owner in context.owners(reader.name, dim) if index is not None else ():
            position = owner[index].flatten()
            total.index_add_(0, position[position >= 0], reader.effects().flatten()[position >= 0])
            seen = True
    return total if seen else torch.full_like(total, _UNKNOWN)
