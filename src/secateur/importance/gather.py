"""From a score per slice of each tensor to a score per position of an axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from secateur.axes import Atom, Layout, positions
from secateur.trace.graph import Axis


@dataclass(frozen=True)
class Context:
    """What a criterion sees: an axis, the model's tensors by name, and how each of their dimensions is laid out.

    >>> import secateur as sec
    >>> def first_come(context: Context) -> Tensor:
    ...     return -torch.arange(context.axis.size)
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Ratio(0.5), importance=first_come).axes[0].keep
    (0, 1, 2, 3)
    """

    axis: Axis
    parameters: Mapping[str, Tensor]
    layouts: Mapping[str, tuple[Layout, ...]]
    norms: frozenset[str] = frozenset()  # the parameters that scale the output of a batch norm
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # shared by all axes of a plan

    def owners(self, tensor: str, dim: int) -> list[Tensor]:
        """For each place of the axis in a dimension, which position owns each index (-1: another axis does)."""
        key = ("owners", tensor, dim)
        if key not in self.memo:
            places: dict[Atom, list[Tensor]] = {}
            for atom, index in positions(self.layouts[tensor][dim]):
                places.setdefault(atom, []).append(torch.from_numpy(index))
            self.memo[key] = places
        return self.memo[key].get(self.axis.atom, [])


def gather(context: Context, slices: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Sum, over every parameter that the axis is part of, the scores of the slices that each position owns."""
    total = torch.zeros(context.axis.size, dtype=torch.float64)
    for site in context.axis.sites:
        parameter = context.parameters.get(site.tensor)
        if parameter is None:
            continue
        key = (slices, site.tensor, site.dim)
        if key not in context.memo:
            context.memo[key] = slices(parameter, site.dim).to("cpu", torch.float64)
        for owner in context.owners(site.tensor, site.dim):
            mine = owner >= 0
            total.index_add_(0, owner[mine], context.memo[key][mine])
    return total


Importance = Callable[[Context], Tensor]
