"""The weights of a traced model, seen from its axes: the plumbing that criteria share.

A criterion is a formula for one number per slice of a tensor, such as Σ|w|². A position of an axis owns slices of many
tensors, and its score is the sum over all of them. `Weights` does that sum: it goes through the model's parameters one
by one, asks the formula for every dimension of one at a time, and adds up what each position owns. So every parameter
is passed over once, whatever the number of axes that it is part of, and nothing but the sums is held.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from secateur.axes import Atom, Layout, free_atoms, owned
from secateur.compat import BatchNorm
from secateur.distributed import whole
from secateur.tracing.graph import Axis, Graph, Site

Sums = Mapping[int, Tensor]  # dimension -> a number for each of its indices, on the CPU, in double precision
Owned = Mapping[Atom, list[tuple[Tensor, Tensor]]]  # axis -> for each of its places, indices and their positions

_CHUNK = 2**17  # elements at a time: what fits into a core's cache


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
    parameters: Mapping[str, Tensor]  # under all their names
    norms: frozenset[str]  # the parameters that scale the output of a batch norm
    weights: Weights = field(repr=False)  # with all axes that are scored together with this one

    @property
    def model(self) -> nn.Module:
        """The model whose graph it is."""
        return self.weights.model

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
                yield site, whole(parameter)

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
        return self.weights.owned(tensor, dim).get(self.axis.atom, [])


Importance = Callable[[Context], Tensor]


def gather(context: Context, slices: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Sum, over every parameter that the axis is part of, the scores of the slices that each position owns."""
    total = torch.zeros(context.axis.size, dtype=torch.float64)
    for site, parameter in context.sites():
        scores = slices(parameter, site.dim).to("cpu", torch.float64)
        for where, position in context.owned(site.tensor, site.dim):
            total.index_add_(0, position, scores[where])
    return total


class Formula(Protocol):
    """A function of each element, such as `torch.abs`, that puts what it gives into `out`."""

    def __call__(self, weight: Tensor, /, *, out: Tensor) -> Tensor: ...


class Weights:
    """The parameters of a graph's model, and the axes of it that are to be scored."""

    def __init__(self, graph: Graph, axes: Sequence[Axis]) -> None:
        self.graph, self.axes = graph, tuple(axes)
        self.model = graph.model
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self.known: dict[Hashable, Mapping[Axis, Tensor]] = {}  # what criteria that were asked by an axis gave to all
        self.observed: dict[int, tuple[Any, Any]] = {}  # by the id of batches, held so that it stays theirs
        self._owned: dict[int, Owned] = {}

    def of(self, axes: Sequence[Axis]) -> Weights:
        """The same for other axes."""
        other = copy(self)
        other.axes, other.known = tuple(axes), {}
        return other

    @cached_property
    def norms(self) -> frozenset[str]:
        """The parameters that scale the output of a batch norm."""
        norms = (name for name, module in self.model.named_modules() if isinstance(module, BatchNorm))
        return frozenset(f"{name}.weight".lstrip(".") for name in norms)

    def context(self, axis: Axis) -> Context:
        """One of the axes, as a function that scores it alone sees it."""
        return Context(axis, self.graph, self.parameters, self.norms, self)

    def dims(self) -> dict[str, list[int]]:
        """The dimensions of each parameter that some axis is part of; of several names the first."""
        wanted = {axis.atom for axis in self.axes}
        found: dict[int, tuple[str, list[int]]] = {}
        for name, layouts in self.graph.layouts.items():
            if name in self.parameters and id(self.parameters[name]) not in found:
                dims = [dim for dim, layout in enumerate(layouts) if not wanted.isdisjoint(free_atoms(layout))]
                found[id(self.parameters[name])] = name, dims
        return {name: dims for name, dims in found.values() if dims}

    def owned(self, tensor: str, dim: int) -> Owned:
        """Which indices of a dimension belong to which positions of each axis."""
        layout = self.graph.layouts[tensor][dim]
        if isinstance(layout, Atom):
            every = torch.arange(layout.size)
            return {layout: [(every, every)]}
        if id(layout) not in self._owned:  # tensors that lie alike share theirs
            places: dict[Atom, list[tuple[Tensor, Tensor]]] = {}
            for atom, where, position in owned(layout):
                places.setdefault(atom, []).append((torch.from_numpy(where), torch.from_numpy(position)))
            self._owned[id(layout)] = places
        return self._owned[id(layout)]

    def gather(self, sums: Callable[[str, Tensor, Sequence[int]], Sums]) -> dict[Axis, Tensor]:
        """For each position, what `sums(name, parameter, dims)` gives to all indices that it owns, added up."""
        total = {axis.atom: torch.zeros(axis.size, dtype=torch.float64) for axis in self.axes}
        for name, dims in self.dims().items():
            for dim, found in sums(name, whole(self.parameters[name]), dims).items():
                for atom, places in self.owned(name, dim).items():
                    for where, position in places if atom in total else ():
                        total[atom].index_add_(0, position, found[where])
        return {axis: total[axis.atom] for axis in self.axes}

    def sum(self, formula: Formula) -> dict[Axis, Tensor]:
        """For each position, the sum of a formula of each weight over all weights that go with it."""
        # One piece of memory to work in for all tensors. Small results between large pieces that pass would keep the
        # allocator from using these again.
        spaces: dict[tuple[torch.dtype, torch.device], Tensor] = {}

        def sums(_: str, parameter: Tensor, dims: Sequence[int]) -> Sums:
            key = (parameter.dtype, parameter.device)
            if key not in spaces:
                spaces[key] = _space(as_real(parameter.detach()), 3 * _CHUNK // 2)
            return {dim: found.cpu() for dim, found in slice_sums(parameter, dims, formula, spaces[key]).items()}

        return self.gather(sums)


def slice_sums(weight: Tensor, dims: Sequence[int], formula: Formula, space: Tensor | None = None) -> dict[int, Tensor]:
    """The sum of a formula of each element over each slice along each of some dimensions, in one pass.

    >>> slice_sums(torch.tensor([[1.0, -2.0], [0.0, 0.5]]), (0, 1), torch.abs)
    {0: tensor([3.0000, 0.5000], dtype=torch.float64), 1: tensor([1.0000, 2.5000], dtype=torch.float64)}

    The formula is given some elements at a time, in at least single precision. `space` is memory to work in, which is
    made where that is not enough.
    """
    weight = as_real(weight.detach())
    total = {d: torch.zeros(weight.shape[d], dtype=torch.float64, device=weight.device) for d in dims}
    along = next((d for d, size in enumerate(weight.shape) if size > 1), 0)
    rows = weight.shape[along]
    step = max(1, _CHUNK * rows // max(weight.numel(), 1))
    most = 3 * step * weight.numel() // (2 * max(rows, 1))  # elements, and sums of two or more of them
    space = _space(weight, most) if space is None or len(space) < most else space
    for start in range(0, rows, step):
        part = weight.narrow(along, start, min(step, rows - start))
        out = space[: part.numel()].view(part.shape)
        values = formula(part if part.dtype == out.dtype else out.copy_(part), out=out)
        lines = _lines(values, max(dims), space[part.numel() :])
        for d in dims:
            others = [other for other in range(lines.ndim) if other != d]
            found = lines.sum(others) if others else lines
            (total[d][start : start + len(found)] if d == along else total[d]).add_(found)
    return total


def as_real(weight: Tensor) -> Tensor:
    """A complex tensor as a real one, of the real and imaginary part in a last dimension; others as they are."""
    return torch.view_as_real(weight.resolve_conj()) if weight.is_complex() else weight


def _lines(values: Tensor, last: int, space: Tensor) -> Tensor:
    """Sums over all dimensions beyond the last that counts."""
    lines = values.flatten(last + 1) if last + 1 < values.ndim else values[..., None]
    if lines.shape[-1] == 1:
        return lines[..., 0]
    lines = lines.view(-1, lines.shape[-1])
    sums = torch.mv(lines, lines.new_ones(lines.shape[-1]), out=space[: len(lines)])
    return sums.view(values.shape[: last + 1])


def _space(like: Tensor, size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.promote_types(like.dtype, torch.float32))


def zero() -> Tensor:
    """What sums of (groups, elements) begin with."""
    return torch.zeros(1, 1, dtype=torch.float64)
