"""Wrong cuts, planted into right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Fault = Callable[[nn.Module], None]


def swap_rows(name: str, dim: int = 0) -> Fault:
    """Two kept slices of one tensor only are the wrong way round."""

    def fault(model: nn.Module) -> None:
        tensor = tensor_at(model, name)
        order = list(range(tensor.shape[dim]))
        order[0], order[1] = order[1], order[0]
        tensor.data = tensor.data.index_select(dim, torch.tensor(order))

    return fault


def roll(name: str, dim: int = 0) -> Fault:
    """Positions off by one."""
    return lambda model: setattr(tensor_at(model, name), "data", tensor_at(model, name).data.roll(1, dim))


def attribute(module: str, name: str, value: Any) -> Fault:
    """An attribute that was forgotten."""
    return lambda model: setattr(model.get_submodule(module), name, value)


def scale(name: str, by: float = 1.001) -> Fault:
    """A tensor of the right shape whose numbers are slightly others."""
    return lambda model: tensor_at(model, name).data.mul_(by)


def tensor_at(model: nn.Module, name: str) -> torch.Tensor:
    return dict([*model.named_parameters(), *model.named_buffers()])[name]
