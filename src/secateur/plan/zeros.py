"""Positions that contribute nothing already, because what makes or what reads them is zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from secateur.axes import positions
from secateur.trace.graph import Axis, Graph


def dead_positions(graph: Graph, axis: Axis) -> Tensor:
    """Which positions of an axis can go without changing the model's outputs."""
    effective = dict(effective_tensors(graph.model))
    made = torch.ones(axis.size, dtype=torch.bool)
    read = torch.ones(axis.size, dtype=torch.bool)
    makers = readers = 0
    for site in axis.sites:
        tensor = effective.get(site.tensor)
        if tensor is None:
            continue
        zero = tensor.movedim(site.dim, 0).flatten(1).eq(0).all(1) if tensor.ndim > 1 else tensor.eq(0)
        for atom, index in positions(graph.layouts[site.tensor][site.dim]):
            if atom is axis.atom:
                owner = torch.from_numpy(index)
                alive = torch.zeros(axis.size, dtype=torch.bool)
                alive[owner[(owner >= 0) & ~zero.cpu()]] = True
                if _reads(tensor, site.dim):
                    read &= ~alive
                    readers += 1
                else:
                    made &= ~alive
                    makers += 1
    makers = 0 if axis.atom.leaks or not axis.exact else makers
    nothing = torch.zeros(axis.size, dtype=torch.bool)
    return (made if makers else nothing) | (read if readers else nothing)


def _reads(tensor: Tensor, dim: int) -> bool:
    """Whether a dimension of a weight is what it sums over."""
    return tensor.ndim > 1 and dim == 1


def effective_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters as the model uses them: masks and parametrizations applied, under the names that hold the data."""
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{name}.{key}".lstrip("."), _effective(model, name, module, key, parameter)


def _effective(model: nn.Module, name: str, module: nn.Module, key: str, parameter: Tensor) -> Tensor:
    data = parameter.detach()
    if key.endswith("_orig"):
        mask = module._buffers.get(f"{key.removesuffix('_orig')}_mask")
        return data if mask is None else data * mask
    owner, _, tail = name.rpartition(".parametrizations.")
    if key == "original" and (tail or name.startswith("parametrizations.")):
        host = model.get_submodule(owner)
        with torch.no_grad():
            return getattr(host, tail or name.removeprefix("parametrizations.")).detach()
    return data
