"""Axes whose basis is free: where only linear maps touch an axis, any rotation of it leaves the model as it is.

What makes the positions of such an axis is rotated by an orthogonal matrix R, and so is what reads them: y = R (W x) in
the one, V' = V Rᵀ in the other, and V' y is what it was. SliceGPT (Ashkboos et al., 2024) uses this for the residual
stream of a few language models; a graph knows such axes of any model. Which op lies in between is not asked: an axis is
free if the model puts out the same, in double precision, when all weights that have part in it are rotated at random,
and also when what makes it is a thousand times larger or smaller and what reads it makes up for that. The first fails
for ops that look at single positions (ReLU, a scale for each), the second for those that bend (tanh, clamps).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secateur.errors import ApplyError, VerifyError
from secateur.importance.weights import Weights
from secateur.progress import progress
from secateur.state.transaction import transaction
from secateur.tracing import unwrap
from secateur.tracing.graph import Axis, Graph, Site
from secateur.tracing.roles import roles
from secateur.verify.run import outputs

_SCALES = (1.0, 1e3, 1e-3)
_OFF = 1e-8  # of an output's largest element; what is rounded in double precision is far below
_ROUNDED = 1e-3  # of a model in single precision that was rotated


@dataclass(frozen=True)
class Rotation:
    """An axis, whether its basis is free and, if it is not, why.

    >>> import secateur as sec
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    >>> sec.rotations(sec.trace(net, torch.ones(3, 4)))[0].free
    True
    """

    axis: Axis
    free: bool
    why: str = ""

    def __str__(self) -> str:
        return f"{self.axis.name} ({self.axis.size}): {'free' if self.free else self.why}"


def rotations(graph: Graph) -> tuple[Rotation, ...]:
    """For each axis of a model, whether only linear maps touch it, so that its basis can be chosen; why not, if not.

    >>> import secateur as sec
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> for rotation in sec.rotations(sec.trace(net, torch.randn(3, 4))):
    ...     print(rotation)
    0 features (8): free
    1 features (6): an op between the weights that make it and those that read it is not linear

    The model runs a few times for each axis, on copies of its weights and on the example that it was traced with, which
    should therefore hold values as the model will see them, not zeros.
    """
    model, found, known = graph.model, [], roles(graph)
    weights = Weights(graph, graph.axes)
    plain = outputs(model, graph.example, torch.float64)
    for axis in progress(graph.axes, "rotations"):
        why = _unfit(weights, axis, known.reads, known.makes)
        if not why:
            why = _bent(weights, axis, plain, known.reads)
        found.append(Rotation(axis, not why, why))
    return tuple(found)


def rotate(model: nn.Module, graph: Graph, axis: Axis, matrix: Tensor) -> nn.Module:
    """Rotate a free axis of a model by an orthogonal matrix, in place, and verify that it puts out what it did.

    >>> import secateur as sec
    >>> _ = torch.manual_seed(0)
    >>> net, x = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3)), torch.randn(5, 4)
    >>> graph, before = sec.trace(net, x), net(x)
    >>> _ = sec.rotate(net, graph, graph.axes[0], torch.tensor([[0.6, -0.8], [0.8, 0.6]]))
    >>> bool((net(x) - before).abs().max() < 1e-5)
    True

    All or nothing: where the output changes by more than rounding, the model is as it was. An optimizer's state is not
    rotated: make a new optimizer.
    """
    inner = unwrap(model)
    if inner is not graph.model:
        raise ApplyError("rotate takes the model that the graph was traced from")
    size = axis.size
    square = matrix.detach().to("cpu", torch.float64)
    if square.shape != (size, size) or not torch.allclose(square @ square.T, torch.eye(size).double(), atol=1e-6):
        raise ApplyError(f"{axis.name} is rotated by an orthogonal matrix of {size} x {size}; this one is not")
    known = roles(graph)
    weights = Weights(graph, graph.axes)
    why = _unfit(weights, axis, known.reads, known.makes)
    if why:
        raise ApplyError(f"{axis.name} cannot be rotated: {why}")
    before = outputs(inner, graph.example, torch.float64)
    with transaction(inner) as undo, torch.no_grad():
        for name, sites in _sites(weights, axis).items():
            tensor = weights.parameters[name]
            undo.keep(tensor)
            tensor.copy_(_rotated(weights, axis, sites, tensor.double(), square))
        off = _difference(before, outputs(inner, graph.example, torch.float64))
        if not off < _ROUNDED:
            raise VerifyError(
                f"{axis.name}: rotated, the model puts out something else (off by {off:.2g}). The model is as it was."
            )
    return model


def _unfit(weights: Weights, axis: Axis, reads: frozenset[Site], makes: frozenset[Site]) -> str:
    """Why an axis cannot be rotated, as far as the graph tells."""
    if not axis.exact:
        return f"its positions are looked at together: {axis.why}"
    others = [site.tensor for site in axis.sites if site.tensor not in weights.parameters]
    if others:
        return f"{others[0]} goes with single positions"
    sites = {site for sites in _sites(weights, axis).values() for site in sites}
    if not sites & reads:
        return "no weight reads it"
    if not sites & makes:
        return "no weight makes it"
    lost = sorted(site.tensor for site in sites - reads - makes)
    return f"it is not known what {lost[0]} has to do with it" if lost else ""


def _bent(weights: Weights, axis: Axis, plain: list[Tensor], reads: frozenset[Site]) -> str:
    """Rotate and stretch copies of the weights: why the model puts out something else; nothing if it does not."""
    found = _sites(weights, axis)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.linalg.qr(torch.randn(axis.size, axis.size, generator=generator, dtype=torch.float64))[0]
    tied = any(len({site in reads for site in sites}) > 1 for sites in found.values())
    for scale in _SCALES[: 1 if tied else None]:

        def change(name: str, tensor: Tensor, scale: float = scale) -> Tensor:
            sites = found.get(name, ())
            return tensor if not sites else _rotated(weights, axis, sites, tensor, matrix, scale, reads)

        try:
            off = _difference(plain, outputs(weights.model, weights.graph.example, torch.float64, change))
        except Exception as error:  # any code of the user's may run here
            return f"the model does not run on rotated weights ({type(error).__name__}: {error})"
        if not off < _OFF:
            return "an op between the weights that make it and those that read it is not linear"
    return ""


def _sites(weights: Weights, axis: Axis) -> Mapping[str, tuple[Site, ...]]:
    """The dimensions of each parameter that an axis has part in; of several names, the first."""
    found: dict[str, tuple[Site, ...]] = {}
    for site, _ in weights.context(axis).sites():
        found[site.tensor] = (*found.get(site.tensor, ()), site)
    return found


def _rotated(
    weights: Weights,
    axis: Axis,
    sites: tuple[Site, ...],
    tensor: Tensor,
    matrix: Tensor,
    scale: float = 1.0,
    reads: frozenset[Site] = frozenset(),
) -> Tensor:
    """A tensor with an axis rotated in some of its dimensions: longer by `scale`, or shorter where that is read."""
    made = tensor.clone()
    for site in sites:
        by = matrix * (1 / scale if site in reads else scale)
        first = made.movedim(site.dim, 0)
        for at in _places(weights, axis, site):  # (positions, as often as each is there)
            first[at] = torch.tensordot(by.to(made), first[at].clone(), dims=1)
    return made


def _places(weights: Weights, axis: Axis, site: Site) -> Iterator[Tensor]:
    """For each place of an axis in a dimension, the indices of its positions, row by row."""
    for where, position in weights.context(axis).owned(site.tensor, site.dim):
        yield where[position.argsort(stable=True)].view(axis.size, -1)


def _difference(one: list[Tensor], other: list[Tensor]) -> float:
    """How far outputs are apart, as a share of the largest element."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        if a.is_floating_point() and a.numel():
            apart = (a - b).abs().max() / a.abs().max().clamp_min(1e-30)
            worst = max(worst, float(apart)) if bool(apart.isfinite()) else float("inf")
    return worst
