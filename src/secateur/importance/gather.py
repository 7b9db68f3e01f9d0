"""From a score per slice of each tensor to a score per position of an axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.axes import Atom, Layout, owned
from secateur.trace.graph import Axis, Graph, Site


@dataclass(frozen=True)
class Context:
    """What a criterion sees: an axis, the graph that it is part of, and the model's parameters by name.

    >>> import secateur as sec
    >>> def first_come(context: Context) -> Tensor:
    ...     return -torch.arange(context.axis.size)
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Ratio(0.5), importance=first_come).axes[0].keep
    (0, 1, 2, 3)
    """

    axis: Axis
    graph: Graph
    parameters: Mapping[str, Tensor]
    norms: frozenset[str] = frozenset()  # the parameters that scale the output of a batch norm
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # shared by all axes of a plan

    @property
    def model(self) -> nn.Module:
        """The model whose graph it is."""
        return self.graph.model

    @property
    def layouts(self) -> Mapping[str, tuple[Layout, ...]]:
        """How each dimension of each tensor is made of axes."""
        return self.graph.layouts

    def sites(self) -> Iterator[tuple[Site, Tensor]]:
        """Where the axis is in parameters, each of them once, however many names it has."""
        seen = set()
        for site in self.axis.sites:
            parameter = self.parameters.get(site.tensor)
            if parameter is not None and (id(parameter), site.dim) not in seen:
                seen.add((id(parameter), site.dim))
                yield site, parameter

    def owners(self, tensor: str, dim: int) -> list[Tensor]:
        """For each place of the axis in a dimension, which position owns each index (-1: another axis does)."""
        found = []
        for where, position in self.owned(tensor, dim):
            owner = torch.full((self.layouts[tensor][dim].size,), -1)
            owner[where] = position
            found.append(owner)
        return found

    def owned(self, tensor: str, dim: int) -> list[tuple[Tensor, Tensor]]:
        """For each place of the axis in a dimension, the indices that it has there and the position of each."""
        layout = self.layouts[tensor][dim]
        if layout is self.axis.atom:
            every = torch.arange(layout.size)
            return [(every, every)]
        key = ("owned", id(layout))  # tensors that lie alike share theirs
        if key not in self.memo:
            places: dict[Atom, list[tuple[Tensor, Tensor]]] = {}
            for atom, where, position in owned(layout):
                places.setdefault(atom, []).append((torch.from_numpy(where), torch.from_numpy(position)))
            self.memo[key] = places
        return self.memo[key].get(self.axis.atom, [])


Importance = Callable[[Context], Tensor]


def gather(context: Context, slices: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Sum, over every parameter that the axis is part of, the scores of the slices that each position owns."""

    def scores(site: Site, parameter: Tensor) -> Tensor:
        key = (slices, site.tensor, site.dim)
        if key not in context.memo:
            context.memo[key] = slices(parameter, site.dim).to("cpu", torch.float64)
        return context.memo[key]

    return collect(context, scores)


def collect(context: Context, scores: Callable[[Site, Tensor], Tensor | None]) -> Tensor:
    """Sum, over every site of the axis, `scores(site, parameter)` (one per index) of what each position owns."""
    total = torch.zeros(context.axis.size, dtype=torch.float64)
    for site, parameter in context.sites():
        found = scores(site, parameter)
        if found is None:
            continue
        for where, position in context.owned(site.tensor, site.dim):
            total.index_add_(0, position, found[where])
    return total
