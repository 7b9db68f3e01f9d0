"""From a score per slice of each tensor to a score per position of an axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.axes import Layout, positions
from secateur.trace.graph import Axis


@dataclass(frozen=True)
class Context:
    """What a criterion sees: an axis, the model's tensors by name, and how each of their dimensions is laid out."""

    axis: Axis
    parameters: Mapping[str, Tensor]
    layouts: Mapping[str, tuple[Layout, ...]]
    norms: frozenset[str] = frozenset()  # the parameters that scale the output of a batch norm


def gather(context: Context, slices: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Sum, over every parameter that the axis is part of, the scores of the slices that each position owns."""
    axis = context.axis
    total = torch.zeros(axis.size, dtype=torch.float64)
    for site in axis.sites:
        parameter = context.parameters.get(site.tensor)
        if parameter is None:
            continue
        scores = slices(parameter, site.dim).to("cpu", torch.float64)
        for atom, index in positions(context.layouts[site.tensor][site.dim]):
            if atom is axis.atom:
                owner = torch.from_numpy(index)
                mine = owner >= 0
                total.index_add_(0, owner[mine], scores[mine])
    return total


Importance = Callable[[Context], Tensor]
