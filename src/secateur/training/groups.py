"""The weights of each position of an axis as one group, wherever they are: what penalties act on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from secateur.importance.weights import Weights
from secateur.tracing.graph import Axis, Graph


@dataclass(frozen=True)
class Member:
    """Indices of one dimension of a parameter, and to which position of an axis each belongs."""

    name: str
    dim: int
    where: Tensor
    position: Tensor


class Groups:
    """Sums over all that goes with each position, as differentiable functions of the parameters.

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    >>> _ = [p.data.fill_(2.0) for p in net.parameters()]
    >>> graph = sec.trace(net, torch.zeros(1, 2))
    >>> groups = Groups(graph, graph.axes)
    >>> groups.squares(dict(net.named_parameters()))[graph.axes[0]].tolist()  # two weights, one bias, one weight
    [16.0, 16.0]
    """

    def __init__(self, graph: Graph, axes: Sequence[Axis]) -> None:
        weights = Weights(graph, axes)
        self.axes = tuple(axes)
        self.shapes = {name: tuple(weights.parameters[name].shape) for name in weights.dims()}
        self._norms = weights.norms
        self._members: dict[Axis, list[Member]] = {axis: [] for axis in axes}
        of_atom = {axis.atom: axis for axis in axes}
        for name, dims in weights.dims().items():
            for dim in dims:
                for atom, places in weights.owned(name, dim).items():
                    for where, position in places if atom in of_atom else ():
                        self._members[of_atom[atom]].append(Member(name, dim, where, position))

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that have a part in some group."""
        return tuple(self.shapes)

    @cached_property
    def sizes(self) -> dict[Axis, Tensor]:
        """How many weights each group has."""
        return self.squares({name: torch.ones(1).expand(shape) for name, shape in self.shapes.items()})

    def squares(self, parameters: Mapping[str, Tensor]) -> dict[Axis, Tensor]:
        """The sum of the squares of each group."""
        return self.products(parameters, parameters)

    def products(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[Axis, Tensor]:
        """The inner product of two values of each group."""
        lines: dict[tuple[str, int], Tensor] = {}
        found = {}
        for axis, members in self._members.items():
            total = first[members[0].name].new_zeros(axis.size)
            for member in members:
                key = member.name, member.dim
                if key not in lines:
                    lines[key] = _sums(first[member.name] * second[member.name], member.dim)
                device = total.device
                line = lines[key].to(device)[member.where.to(device)]
                total = total.index_add(0, member.position.to(device), line.to(total.dtype))
            found[axis] = total
        return found

    def scales(self, parameters: Mapping[str, Tensor]) -> dict[Axis, Tensor]:
        """The scales of batch norms, of each axis that has one: the sum of their sizes where there are several."""
        found = {}
        for axis, members in self._members.items():
            chosen = [member for member in members if member.name in self._norms]
            if chosen:
                total = parameters[chosen[0].name].new_zeros(axis.size)
                for m in chosen:
                    scale = parameters[m.name].abs()[m.where.to(total.device)]
                    total = total.index_add(0, m.position.to(total.device), scale)
                found[axis] = total
        return found

    @torch.no_grad()
    def zero(self, parameters: Mapping[str, Tensor], dead: Mapping[Axis, Tensor]) -> None:
        """Set all weights of some positions to zero."""
        for name, dim, gone in self._gone(dead):
            parameters[name].index_fill_(dim, gone.to(parameters[name].device), 0)

    def _gone(self, dead: Mapping[Axis, Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        for axis, positions in dead.items():
            if positions.any():
                for member in self._members[axis]:
                    yield member.name, member.dim, member.where[positions[member.position]]


def _sums(values: Tensor, dim: int) -> Tensor:
    others = [other for other in range(values.dim()) if other != dim]
    return values.sum(others) if others else values
