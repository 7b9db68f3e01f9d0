"""Axes whose basis is free: where only linear maps touch an axis, any rotation of it leaves the model as it is.

What makes the positions of such an axis is rotated by an orthogonal matrix R, and so is what reads them: y = R (W x) in
the one, V' = V Rᵀ in the other, and V' y is what it was. SliceGPT (Ashkboos et al., 2024) uses this for the residual
stream of a few language models; a graph knows such axes of any model. The op that lies in between is only asked to save
time: an axis is free if the model puts out the same, in double precision, when all weights that have part in it are
rotated at random, and also when what makes it is hundreds of times larger or smaller and what reads it makes up for
that. The first fails for ops that look at single positions (ReLU, a scale for each), the second for those that bend
(tanh, clamps). Scales that each position has of its own, as in a batch norm, are put into weights first (`folds`).
Where a statistic over positions, as in an RMSNorm, makes up for the length of what it is given, the rotated model is
compared with one whose makers are as large. Where an axis is there many times, as the values of each head of attention
are, each of its parts has a basis of its own, if the model puts out the same then, too.
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
from secateur.pipeline.folds import Fold, FoldableScales
from secateur.state.held import named_tensors
from secateur.state.transaction import transaction
from secateur.tracing import unwrap
from secateur.tracing.graph import GRAPH, Axis, Graph, Site
from secateur.tracing.roles import Roles, bent, roles
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
    folded: tuple[str, ...] = ()  # vectors that `rotate` puts into the weights before or behind them

    def __str__(self) -> str:
        apart = f", {self.parts} times" if self.parts > 1 else ""
        more = f" and {len(self.folded) - 1} more" if len(self.folded) > 1 else ""
        first = f", once the scale of {self.folded[0]}{more} is folded into weights" if self.folded else ""
        return f"{self.axis.name} ({self.axis.size}{apart}): {f'free{first}' if self.free else self.why}"


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
    return tuple(_told(axis, places.get(axis), whys.get(axis, "")) for axis in graph.axes)


def _told(axis: Axis, own: Places | None, why: str) -> Rotation:
    """What is said of an axis, with its places if it is free."""
    if own is None:
        return Rotation(axis, False, why)
    return Rotation(axis, True, "", own.parts, tuple(fold.name for fold in own.folds))


def free_places(weights: Weights, example: Any) -> tuple[Mapping[Axis, Places], Mapping[Axis, str]]:
    """The axes that are free, as runs on an example show, with their places; and why the others are not."""
    known = _roles(weights)
    places, whys = _places(weights, known, example)
    trial = _RotatedRuns(weights, known, example)
    apart = trial.free([own for own in places.values() if own.parts > 1])
    alike = trial.free([own.alike() for axis, own in places.items() if axis not in apart])
    found = {axis: apart.get(axis) or alike[axis] for axis in places if axis in apart or axis in alike}
    return found, whys | {axis: trial.why(axis) for axis in places if axis not in found}


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
    rotated: make a new optimizer. Where a batch norm is on the axis, it is the output in eval mode that stays; in
    training mode each direction gets statistics of its own.
    """
    rules = {"graph": GRAPH, "axis": an_instance(Axis, "one of graph.axes")}
    check("rotate", ApplyError, locals(), **rules, matrix=an_instance(Tensor, "a tensor"))
    inner = unwrap(model)
    if axis not in graph.axes:
        raise ApplyError("rotate: axis is one of graph.axes, and this one is of another graph")
    if inner is not graph.model:
        raise ApplyError("rotate takes the model that the graph was traced from")
    weights = Weights(graph, [axis])
    found, whys = _places(weights, _roles(weights), graph.example)
    if axis in whys:
        raise ApplyError(f"{axis.name} cannot be rotated: {whys[axis]}")
    places, square = found[axis], matrix.detach().to("cpu", torch.float64)
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
                undo.keep(own.held[name])
                own.held[name].copy_(own.rotated(name, own.held[name].double(), matrix))
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


def _places(weights: Weights, known: Roles, example: Any) -> tuple[dict[Axis, Places], dict[Axis, str]]:
    """Where each axis is that may be free, with what has to be folded; why the others are not, as far as is told."""
    folds = FoldableScales(weights, known, example)
    bends = bent(weights.graph, folds.vectors)
    found: dict[Axis, Places] = {}
    whys: dict[Axis, str] = {}
    for axis in weights.axes:
        sites = {site for site, _ in weights.context(axis).sites()}
        read = bool(sites & known.reads)
        if not read and axis.atom not in known.mixed:
            whys[axis] = "no weight reads it"
        elif not sites & known.makes:
            whys[axis] = "no weight makes it"
        elif axis.exact and axis.atom in bends:
            whys[axis] = _NOT_LINEAR
        else:
            own, why = folds.of(axis)
            if why or (why := _unfit(weights, axis, known, own)):
                whys[axis] = why
            else:
                found[axis] = Places(weights, axis, own, read=read)
    return found, whys


def _unfit(weights: Weights, axis: Axis, known: Roles, folds: Sequence[Fold]) -> str:
    """Why an axis cannot be rotated though what is between its weights may be linear."""
    settled = {name for fold in folds for name in fold.touched}
    others = [s.tensor for s in axis.sites if s.tensor not in weights.parameters and s.tensor not in settled]
    if others:
        return f"{others[0]} goes with single positions"
    sites = {site for site, _ in weights.context(axis).sites()} - known.reads - known.makes
    lost = sorted(site.tensor for site in sites if site.tensor not in settled)
    return f"it is not known what {lost[0]} has to do with it" if lost else ""


class Places:
    """Where an axis is in the model's parameters: for each place, which positions and which of its parts are there.

    What goes with an axis wherever it is, as the heads do with the values of each, tells its parts. Of some axes, such
    as those of queries and keys, what one weight makes is multiplied with what another does, and none is `read`.
    """

    def __init__(
        self, weights: Weights, axis: Axis, folds: Sequence[Fold] = (), *, read: bool, apart: bool = True
    ) -> None:
        self.axis, self.folds, self.read, self._weights = axis, tuple(folds), read, weights
        self.held = dict(named_tensors(weights.model))
        found: dict[str, tuple[Site, ...]] = {}
        buffers = (site for site in axis.sites if site.tensor not in weights.parameters)
        for site in (*(site for site, _ in weights.context(axis).sites()), *buffers):  # of several names the first
            found[site.tensor] = (*found.get(site.tensor, ()), site)
        self.tensors: Mapping[str, tuple[Site, ...]] = found
        self._beside = self._shared() if apart else ()
        self.parts = reduce(lambda size, atom: size * atom.size, self._beside, 1)

    def alike(self) -> Places:
        """With one basis for all parts."""
        return Places(self._weights, self.axis, self.folds, read=self.read, apart=False)

    def folding(self, folds: Mapping[Fold, Fold]) -> Places:
        """With others in the place of some of what is folded."""
        others = [folds.get(fold, fold) for fold in self.folds]
        return Places(self._weights, self.axis, others, read=self.read, apart=bool(self._beside))

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
        """A tensor with the axis rotated in it, (parts, size, size): longer by `scale`, or shorter where it is read.

        Where a statistic makes up for the length, what is read is as long as ever.
        """
        made = tensor.clone()
        even = [fold for fold in self.folds if name in fold.even]
        for site in self.tensors[name]:
            less = 1 / scale if self.axis.exact else 1.0
            by, first = matrix.to(made) * (less if site in reads else scale), made.movedim(site.dim, 0)
            for index, part in ((i.to(made.device), p.to(made.device)) for i, p in self.at(site)):
                if even:
                    even[0].evened(name, made, index, matrix[part.cpu()])
                    continue
                for fold in (fold for fold in self.folds if site in fold.into):
                    first[index] *= fold.scale.to(made)[index][(..., *[None] * (first.ndim - 1))]
                first[index] = torch.einsum("nij,jn...->in...", by[part], first[index])
        return made


def _why_not(axis: Axis) -> str:
    return _NOT_LINEAR if axis.exact else f"its positions are looked at together: {axis.why}"


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
        return self._errors.get(axis, _why_not(axis))

    def _same(self, places: Sequence[Places]) -> bool:
        generator = torch.Generator().manual_seed(0)
        matrices, stretch = [], []
        for own in places:
            size = own.axis.size
            matrices.append(torch.linalg.qr(torch.randn(own.parts, size, size, generator=generator).double())[0])
            every = own.tensors.values()
            tied = any(len({site in self._reads for site in sites}) > 1 or self._both & {*sites} for sites in every)
            free = not (tied and own.axis.exact)
            stretch.append(2 + float(torch.rand((), generator=generator)) if free else 0.0)
        longer = any(stretch) and not all(own.axis.exact and own.read for own in places)  # nothing makes up for it
        still = [torch.eye(own.axis.size).double().expand(own.parts, -1, -1) for own in places]
        for power in (0, 1, -1) if any(stretch) else (0,):

            def run(bases: Sequence[Tensor], power: int = power) -> list[Tensor]:
                def change(name: str, tensor: Tensor) -> Tensor:
                    for own, matrix, much in zip(places, bases, stretch, strict=True):
                        if name in own.tensors:
                            tensor = own.rotated(name, tensor, matrix, 10 ** (power * much), self._reads)
                    return tensor

                return outputs(self._model, self._example, torch.float64, change)

            try:
                off = difference(run(still) if longer and power else self._plain, run(matrices))
            except Exception as error:  # any code of the user's may run here
                why = f"the model does not run on rotated weights ({type(error).__name__}: {error})"
                self._errors |= {own.axis: why for own in places}
                return False
            if not off < _OFF:
                self._errors |= {own.axis: _why_not(own.axis) for own in places}
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
