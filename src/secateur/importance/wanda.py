"""Weights times activations: a weight counts for as much as it carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.importance.criterion import Criterion
from secateur.importance.gather import Context, collect
from secateur.importance.magnitude import Magnitude
from secateur.importance.readings import Reading, instead, readings
from secateur.trace.graph import Site


@dataclass(frozen=True, eq=False)
class Wanda(Criterion):
    """Σ |w|·‖x‖ over all weights that go with a position, x being what each is multiplied with (Sun et al., 2023).

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> net[0].weight.data = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.5, 0.0]])
    >>> net[2].weight.data = torch.ones(1, 3)
    >>> batches = [torch.tensor([[4.0, 1.0]])]
    >>> sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.4), importance=Wanda(batches)).axes[0].keep
    (0, 2)

    ‖x‖ is the root mean square over all batches, so that their number does not matter. The sum is over the weights of
    products (linear layers, convolutions, recurrent layers) that make or read a position; biases and norms have no
    part in it. `batches` is an iterable of examples as in `trace`, or a function that makes one. The model runs in
    eval mode and is left as it was.
    """

    batches: Any

    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""
        seen = readings(context, self.batches, "Wanda")
        if not any(id(parameter) in seen for _, parameter in context.sites()):
            return instead(context, "Wanda", Magnitude(1))

        def slices(site: Site, parameter: Tensor) -> Tensor | None:
            found = seen.get(id(parameter))
            if found is None:
                return None
            key = ("wanda", id(seen), site.tensor, site.dim)
            if key not in context.memo:
                total = torch.zeros(parameter.shape[site.dim], dtype=torch.float64)
                context.memo[key] = sum((_carried(reading, site.dim, len(total)) for reading in found), total)
            return context.memo[key]

        return collect(context, slices)


def _carried(reading: Reading, dim: int, size: int) -> Tensor:
    """Σ |w|·‖x‖ at each index of a dimension of the parameter."""
    precise = torch.promote_types(reading.weight.dtype, torch.float32)
    carried = reading.weight.to("cpu", precise).abs() * reading.inputs.sqrt().to(precise).unsqueeze(1)
    at = reading.index[dim]
    along = [i for i in range(3) if at.shape[i] == 1]
    sums = carried.sum(along, keepdim=True, dtype=torch.float64) if along else carried.to(torch.float64)
    return torch.zeros(size, dtype=torch.float64).index_add_(0, at.flatten(), sums.flatten())
