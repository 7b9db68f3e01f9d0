"""Axes whose basis is free: where only linear maps touch an axis, any rotation of it leaves the model as it is.

What makes the positions of such an axis is rotated by an orthogonal matrix R, and so is what reads them: y = R (W x) in
the one, V' = V Rᵀ in the other, and V' y is what it was. SliceGPT (Ashkboos et al., 2024) uses this for the residual
stream of a few language models; a graph knows such axes of any model. The op that lies in between is only asked to save
time: an axis is free if the model puts out the same, in double precision, when all weights that have part in it are
rotated at random, and also when what makes it is hundreds of times larger or smaller and what reads it makes up for
that. The first fails for ops that look at single positions (ReLU, a scale for each), the second for those that bend
(tanh, clamps). Where an axis is there many times, as the values of each head of attention are, each of its parts has a
basis of its own, if the model puts out the same then, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from secateur.arguments import an_instance, check
from secateur.axes import Atom
from secateur.errors import ApplyError, PlanError, VerifyError
from secateur.importance.weights import Weights
from secateur.state.transaction import transaction
from secateur.tracing import unwrap
from secateur.tracing.graph import GRAPH, Axis, Graph, Site
from secateur.tracing.roles import Roles, roles
from secateur.verify.run import outputs

_OFF = 1e-8  # of an output's largest element; what is rounded in double precision is far below
ROUNDED = 1e-3  # of a model in single precision that was rotated
_NOT_LINEAR = "an op between the weights that make it and those that read it is not linear"


@dataclass(frozen=True)
class Rotation:
    """An axis, whether its basis is free and, if it is not, why; `parts` of it, such as heads, have each their own.

    >>> import secateur as sec
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    >>> sec.rotations(sec.trace(net, torch.ones(3, 4)))[0].free
    True
    """

    axis: Axis
    free: bool
    why: str = ""
    parts: int = 1

    def __str__(self) -> str:
        apart = f", {self.parts} times" if self.parts > 1 else ""
        return f"{self.axis.name} ({self.axis.size}{apart}): {'free' if self.free else self.why}"


def rotations(graph: Graph) -> tuple[Rotation, ...]:
    """For each axis of a model, whether only linear maps touch it, so that its basis can be chosen; why not, if not.

    >>> import secateur as sec
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> for rotation in sec.rotations(sec.trace(net, torch.randn(3, 4))):
    ...     print(rotation)
    0 features (8): free
    1 features (6): an op between the weights that make it and those that read it is not linear

    The model runs a few times, on copies of its weights and on the example that it was traced with, which should
    therefore hold values as the model will see them, not zeros.
    """
    check("rotations", PlanError, locals(), graph=GRAPH)
    places, whys = free_places(Weights(graph, graph.axes), graph.example)
    return tuple(
        Rotation(axis, axis in places, whys.get(axis, ""), places[axis].parts if axis in places else 1)
        for axis in graph.axes
    )


def free_places(weights: Weights, example: Any) -> tuple[Mapping[Axis, Places], Mapping[Axis, str]]:
    """The axes that are free, as runs on an example show, with their places; and why the others are not."""
    known = _roles(weights)
    whys = {axis: _unfit(weights, axis, known) for axis in weights.axes}
    places = {axis: Places(weights, axis) for axis, why in whys.items() if not why}
    trial = _RotatedRuns(weights, known, example)
    apart = trial.free([own for own in places.values() if own.parts > 1])
    alike = trial.free([own.alike() for axis, own in places.items() if axis not in apart])
    found = {axis: apart.get(axis) or alike[axis] for axis in places if axis in apart or axis in alike}
    return found, {axis: why or trial.why(axis) for axis, why in whys.items() if axis not in found}


def rotate(model: nn.Module, graph: Graph, axis: Axis, matrix: Tensor) -> nn.Module:
    """Rotate a free axis of a model by an orthogonal matrix, in place, and verify that it puts out what it did.

    >>> import secateur as sec
    >>> _ = torch.manual_seed(0)
    >>> net, x = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3)), torch.randn(5, 4)
    >>> graph, before = sec.trace(net, x), net(x)
    >>> _ = sec.rotate(net, graph, graph.axes[0], torch.tensor([[0.6, -0.8], [0.8, 0.6]]))
    >>> bool((net(x) - before).abs().max() < 1e-5)
    True

    Where `rotations` says that an axis has several parts, there may be a matrix for each: (parts, size, size).
    All or nothing: where the output changes by more than rounding, the model is as it was. An optimizer's state is not
    rotated: make a new optimizer.
    """
    rules = {"graph": GRAPH, "axis": an_instance(Axis, "one of graph.axes")}
    check("rotate", ApplyError, locals(), **rules, matrix=an_instance(Tensor, "a tensor"))
    inner = unwrap(model)
    if axis not in graph.axes:
        raise ApplyError("rotate: axis is one of graph.axes, and this one is of another graph")
    if inner is not graph.model:
        raise ApplyError("rotate takes the model that the graph was traced from")
    weights = Weights(graph, graph.axes)
    why = _unfit(weights, axis, _roles(weights))
    if why:
        raise ApplyError(f"{axis.name} cannot be rotated: {why}")
    places, square = Places(weights, axis), matrix.detach().to("cpu", torch.float64)
    places = places.alike() if square.ndim == 2 else places
    square = square if square.ndim == 3 else square.unsqueeze(0)
    one = torch.eye(axis.size).double()
    if square.shape != (places.parts, *one.shape) or not torch.allclose(
        square @ square.mT, one.expand_as(square), atol=1e-6
    ):
        times = f", or by {places.parts} of these" if places.parts > 1 else ""
        raise ApplyError(
            f"{axis.name} is rotated by an orthogonal matrix of {axis.size} x {axis.size}{times}; this one is not"
        )
    rotate_all(weights, {places: square}, graph.example)
    return model


def rotate_all(weights: Weights, matrices: Mapping[Places, Tensor], example: Any) -> None:
    """Rotate axes, each by its matrices, in place, and verify on an example: all or nothing."""
    model = weights.model
    before = outputs(model, example, torch.float64)
    with transaction(model) as undo, torch.no_grad():
        for own, matrix in matrices.items():
            for name in own.tensors:
                tensor = weights.parameters[name]
                undo.keep(tensor)
                tensor.copy_(own.rotated(name, tensor.double(), matrix))
        off = difference(before, outputs(model, example, torch.float64))
        if not off < ROUNDED:
            names = ", ".join(own.axis.name for own in matrices)
            raise VerifyError(
                f"{names}: rotated, the model puts out something else (off by {off:.2g}). The model is as it was."
            )


def _roles(weights: Weights) -> Roles:
    """Who makes and who reads each axis, a parameter that has several names by the first of them."""
    known, first = roles(weights.graph), dict[int, str]()
    for name, parameter in weights.parameters.items():
        first.setdefault(id(parameter), name)

    def named(sites: frozenset[Site]) -> frozenset[Site]:
        held = weights.parameters
        return frozenset(Site(first[id(held[s.tensor])], s.dim) if s.tensor in held else s for s in sites)

    return replace(known, reads=named(known.reads), makes=named(known.makes))


def _unfit(weights: Weights, axis: Axis, known: Roles) -> str:
    """Why an axis cannot be rotated, as far as the graph tells."""
    if not axis.exact:
        return f"its positions are looked at together: {axis.why}"
    others = [site.tensor for site in axis.sites if site.tensor not in weights.parameters]
    if others:
        return f"{others[0]} goes with single positions"
    sites = {site for site, _ in weights.context(axis).sites()}
    if not sites & known.reads:
        return "no weight reads it"
    if not sites & known.makes:
        return "no weight makes it"
    lost = sorted(site.tensor for site in sites - known.reads - known.makes)
    if lost:
        return f"it is not known what {lost[0]} has to do with it"
    return _NOT_LINEAR if axis.atom in known.bent else ""


class Places:
    """Where an axis is in the model's parameters: for each place, which positions and which of its parts are there.

    What goes with an axis wherever it is, as the heads do with the values of each, tells its parts.
    """

    def __init__(self, weights: Weights, axis: Axis, *, apart: bool = True) -> None:
        self.axis, self._weights = axis, weights
        found: dict[str, tuple[Site, ...]] = {}
        for site, _ in weights.context(axis).sites():  # of several names of a parameter, the first
            found[site.tensor] = (*found.get(site.tensor, ()), site)
        self.tensors: Mapping[str, tuple[Site, ...]] = found
        self._beside = self._shared() if apart else ()
        self.parts = reduce(lambda size, atom: size * atom.size, self._beside, 1)

    def alike(self) -> Places:
        """With one basis for all parts."""
        return Places(self._weights, self.axis, apart=False)

    def _shared(self) -> tuple[Atom, ...]:
        """The axes that are beside it in each of its places."""
        shared: dict[Atom, None] | None = None
        for site in (site for sites in self.tensors.values() for site in sites):
            for where, _ in self._weights.context(self.axis).owned(site.tensor, site.dim):
                mine = {a: None for a in self._weights.owned(site.tensor, site.dim) if a is not self.axis.atom}
                mine = {a: None for a in mine if a.size > 1 and bool((self._position(a, site)[where] >= 0).all())}
                shared = mine if shared is None else {atom: None for atom in shared if atom in mine}
        return tuple(shared or ())

    def _position(self, atom: Atom, site: Site) -> Tensor:
        """The position of another axis at each index of a dimension; -1 where it has none, or several."""
        found = torch.full((self._weights.graph.layouts[site.tensor][site.dim].size,), -1)
        times = torch.zeros_like(found)
        for where, position in self._weights.owned(site.tensor, site.dim)[atom]:
            found[where] = position
            times[where] += 1
        return found.where(times == 1, -1)

    def at(self, site: Site) -> Iterator[tuple[Tensor, Tensor]]:
        """For each place in a dimension, indices as (positions, times), and which part each of the times is."""
        for where, position in self._weights.context(self.axis).owned(site.tensor, site.dim):
            index = where[position.argsort(stable=True)].view(self.axis.size, -1)
            part = torch.zeros_like(index[0])
            for atom in self._beside:
                part = part * atom.size + self._position(atom, site)[index[0]]
            yield index, part

    def rotated(
        self, name: str, tensor: Tensor, matrix: Tensor, scale: float = 1.0, reads: frozenset[Site] = frozenset()
    ) -> Tensor:
        """A tensor with the axis rotated in it, (parts, size, size): longer by `scale`, or shorter where it is read."""
        made = tensor.clone()
        for site in self.tensors[name]:
            by = matrix.to(made) * (1 / scale if site in reads else scale)
            first = made.movedim(site.dim, 0)
            for places in self.at(site):
                index, part = (place.to(made.device) for place in places)
                first[index] = torch.einsum("nij,jn...->in...", by[part], first[index])
        return made


class _RotatedRuns:
    """Runs of a model with some of its axes rotated at random and stretched."""

    def __init__(self, weights: Weights, known: Roles, example: Any) -> None:
        self._model, self._example, self._reads = weights.model, example, known.reads
        self._both = known.reads & known.makes  # of one table for input and output
        self._errors: dict[Axis, str] = {}

    def free(self, places: Sequence[Places]) -> dict[Axis, Places]:
        """The axes that leave the output as it is: all at a time and, where they do not, one half after the other."""
        if not places:
            return {}
        if self._same(places):
            return {own.axis: own for own in places}
        half = len(places) // 2
        return self.free(places[:half]) | self.free(places[half:]) if half else {}

    def why(self, axis: Axis) -> str:
        """Why an axis is not free."""
        return self._errors.get(axis, _NOT_LINEAR)

    def _same(self, places: Sequence[Places]) -> bool:
        generator = torch.Generator().manual_seed(0)
        matrices, stretch = [], []
        for own in places:
            size = own.axis.size
            matrices.append(torch.linalg.qr(torch.randn(own.parts, size, size, generator=generator).double())[0])
            every = own.tensors.values()
            tied = any(len({site in self._reads for site in sites}) > 1 or self._both & {*sites} for sites in every)
            stretch.append(0.0 if tied else 2 + float(torch.rand((), generator=generator)))
        for power in (0, 1, -1) if any(stretch) else (0,):

            def change(name: str, tensor: Tensor, power: int = power) -> Tensor:
                for own, matrix, much in zip(places, matrices, stretch, strict=True):
                    if name in own.tensors:
                        tensor = own.rotated(name, tensor, matrix, 10 ** (power * much), self._reads)
                return tensor

            try:
                off = difference(self._plain, outputs(self._model, self._example, torch.float64, change))
            except Exception as error:  # any code of the user's may run here
                why = f"the model does not run on rotated weights ({type(error).__name__}: {error})"
                self._errors |= {own.axis: why for own in places}
                return False
            if not off < _OFF:
                self._errors |= {own.axis: _NOT_LINEAR for own in places}
                return False
        return True

    @cached_property
    def _plain(self) -> list[Tensor]:
        return outputs(self._model, self._example, torch.float64)


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    """How far outputs are apart, as a share of the largest element."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        if a.is_floating_point() and a.numel():
            apart = (a - b).abs().max() / a.abs().max().clamp_min(1e-30)
            worst = max(worst, float(apart)) if bool(apart.isfinite()) else float("inf")
    return worst
