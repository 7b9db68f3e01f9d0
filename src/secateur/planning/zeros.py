"""Positions that contribute nothing already, because what makes or what reads them is zero."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from secateur.axes import free_atoms, positions
from secateur.compat import BatchNorm
from secateur.distributed import whole
from secateur.state.held import read
from secateur.tracing.graph import Axis, Graph, Site
from secateur.tracing.roles import Roles, roles


def dead_positions(graph: Graph, axes: tuple[Axis, ...]) -> dict[Axis, Tensor]:
    """For each axis that has any, which positions can go without changing the model's outputs.

    Only of exact axes: elsewhere the mere presence of a position changes a statistic.
    """
    effective = dict(effective_tensors(graph))
    known = roles(graph)
    dead = {axis: _dead(graph, axis, effective, known) for axis in axes if axis.exact}
    return {axis: gone for axis, gone in dead.items() if gone.any()}


def can_die(graph: Graph) -> tuple[Axis, ...]:
    """The axes that something reads, and whose positions could go without a change if all their parameters were 0."""
    effective = {name: torch.zeros(()).expand(tensor.shape) for name, tensor in graph.model.named_parameters()}
    effective |= {name: tensor for name, tensor in effective_tensors(graph) if name not in effective}
    known = roles(graph)
    able = (axis for axis in graph.axes if axis.exact and _is_read(graph, axis, known))
    return tuple(axis for axis in able if bool(_dead(graph, axis, effective, known).all()))


def _is_read(graph: Graph, axis: Axis, known: Roles) -> bool:
    return axis.atom in known.mixed or any(site in known.reads for site in _sites(graph, axis))


def nearly_dead(graph: Graph, axes: tuple[Axis, ...]) -> Iterator[str]:
    """Where a weight that makes positions is zero and these stay all the same, with what is in the way."""
    effective = dict(effective_tensors(graph))
    known = roles(graph)
    for axis in axes:
        sites = [site for site in _sites(graph, axis) if site.tensor in effective and site not in known.reads]
        alive = {site: _alive(graph, axis, site, effective[site.tensor]) for site in sites}
        weights = [site for site in sites if effective[site.tensor].dim() > 1]
        if not weights:
            continue
        zero = ~torch.stack([alive[site] for site in weights]).any(0)
        kept = zero if not axis.exact else zero & ~_dead(graph, axis, effective, known)
        if kept.any():
            others = [site.tensor for site in sites if (alive[site] & kept).any()]
            named = f"{' and '.join(others[:2])} {'are' if len(others) > 1 else 'is'} not"
            why = named if others else _still_counts(axis)
            yield f"{int(kept.sum())} of {axis.name} are zero in {weights[0].tensor}, but {why}"


def _still_counts(axis: Axis) -> str:
    return "a zero is not left as it is" if axis.exact else f"a zero counts there ({axis.why})"


def _dead(graph: Graph, axis: Axis, effective: Mapping[str, Tensor], known: Roles) -> Tensor:
    made = torch.full((axis.size,), not axis.atom.leaks)
    unread = torch.full((axis.size,), axis.atom not in known.mixed)
    readers = makers = 0
    for site in _sites(graph, axis):
        if site.tensor not in effective:
            continue
        alive = _alive(graph, axis, site, effective[site.tensor])
        if site in known.reads:
            unread &= ~alive
            readers += 1
        if site in known.makes or site not in known.reads:
            made &= ~alive
            makers += 1
    return (made & (makers > 0)) | (unread & (readers > 0))


def _sites(graph: Graph, axis: Axis) -> Iterator[Site]:
    """Where an axis is, tensors in plain attributes included."""
    yield from axis.sites
    for name in graph.places:
        for i, layout in enumerate(graph.layouts[name]):
            if axis.atom in free_atoms(layout):
                yield Site(name, i)


def _alive(graph: Graph, axis: Axis, site: Site, tensor: Tensor) -> Tensor:
    """Which positions of an axis have anything but zeros in a tensor."""
    nonzero = whole(tensor).movedim(site.dim, 0).reshape(tensor.shape[site.dim], -1).ne(0).any(1).cpu()
    alive = torch.zeros(axis.size, dtype=torch.bool)
    for atom, index in positions(graph.layouts[site.tensor][site.dim]):
        if atom is axis.atom:
            owner = torch.from_numpy(index)
            alive[owner[(owner >= 0) & nonzero]] = True
    return alive


def effective_tensors(graph: Graph) -> Iterator[tuple[str, Tensor]]:
    """Tensors as the model uses them: masks and parametrizations applied, under the names that hold the data.

    Left out are those that matter only together with others: a mask, and the statistics of a norm that scales (or,
    of one that does not, its variance).
    """
    model = graph.model
    for name, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not _beside(module, key):
                yield f"{name}.{key}".lstrip("."), _effective(model, name, module, key, tensor.detach())
    for name, place in graph.places.items():
        yield name, read(model, place).detach()


def _beside(module: nn.Module, key: str) -> bool:
    if isinstance(module, BatchNorm) and key in module._buffers:
        return key != "running_mean" or module.weight is not None
    return key.endswith("_mask") and f"{key.removesuffix('_mask')}_orig" in module._parameters


def _effective(model: nn.Module, name: str, module: nn.Module, key: str, tensor: Tensor) -> Tensor:
    if key.endswith("_orig"):
        mask = module._buffers.get(f"{key.removesuffix('_orig')}_mask")
        return tensor if mask is None else whole(tensor) * whole(mask)
    owner, _, tail = f".{name}".rpartition(".parametrizations.")
    if key == "original" and tail:
        with torch.no_grad():
            return getattr(model.get_submodule(owner.lstrip(".")), tail).detach()
    return tensor
