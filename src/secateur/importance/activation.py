"""Activations: what is never large matters little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.importance.criterion import Criterion
from secateur.importance.gather import Context
from secateur.importance.magnitude import Magnitude
from secateur.importance.readings import Reading, Readings, instead, readings


@dataclass(frozen=True, eq=False)
class Activation(Criterion):
    """The root mean square of a position's values where weights read them, over all batches.

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> net[0].weight.data = torch.tensor([[1.0], [-9.0], [2.0]])
    >>> batches = [torch.ones(4, 1), torch.ones(2, 1)]
    >>> sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.4), importance=Activation(batches)).axes[0].keep
    (0, 2)

    `batches` is an iterable of examples as in `trace`, or a function that makes one. A value counts as often as it is
    read: by each layer that reads it, by a convolution at each place of its kernel. An axis that no weight reads (that
    of queries and keys) is looked at where weights make it. The model runs in eval mode and is left as it was.
    """

    batches: Any

    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""
        seen = readings(context, self.batches, "Activation")
        for part in (_read, _made):
            squares, values = _gathered(context, seen, part)
            if values.all():
                return (squares / values).sqrt()
        return instead(context, "Activation", Magnitude())


def _gathered(context: Context, seen: Readings, part: Any) -> tuple[Tensor, Tensor]:
    """For each position, the sum of the mean squares of its values, and how many values it has."""
    squares, values = torch.zeros(2, context.axis.size, dtype=torch.float64)
    for site, parameter in context.sites():
        for reading in seen.get(id(parameter), ()):
            at = reading.index.get(site.dim)
            for owner in context.owners(site.tensor, site.dim) if at is not None else ():
                found = part(reading, owner[at])
                if found is not None:
                    own, means = found
                    own = own.expand(means.shape)
                    mine = own >= 0
                    squares.index_add_(0, own[mine], means[mine])
                    values.index_add_(0, own[mine], torch.ones_like(means[mine]))
    return squares, values


def _read(reading: Reading, own: Tensor) -> tuple[Tensor, Tensor] | None:
    """The owner of each input, and its mean square, where an owner does not depend on the output."""
    return (own[:, 0], reading.inputs) if (own == own[:, :1]).all() else None


def _made(reading: Reading, own: Tensor) -> tuple[Tensor, Tensor] | None:
    """The owner of each output, and its mean square, where an owner does not depend on the input."""
    return (own[:, :, 0], reading.outputs) if (own == own[:, :, :1]).all() else None
