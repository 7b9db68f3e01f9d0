"""Dotted names (fully qualified names, "fqn") of the modules and tensors of a model."""

from typing import Any

import torch
from torch import nn


def module_to_fqn(model: nn.Module, module: nn.Module, prefix: str = "") -> str | None:
    """
    >>> model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
    >>> module_to_fqn(model, model[1][0])
    '1.0'

    The name of `module` inside `model`: "" for the model itself, None for a stranger.
    A name that is not empty begins with `prefix`.
    """
    for name, candidate in model.named_modules():
        if candidate is module:
            return prefix + name if name else name
    return None


def fqn_to_module(model: nn.Module | None, path: str) -> nn.Module | torch.Tensor | None:
    """
    >>> model = nn.Sequential(nn.Linear(2, 3))
    >>> fqn_to_module(model, "0"), fqn_to_module(model, "0.weight").shape, fqn_to_module(model, "1")
    (Linear(in_features=2, out_features=3, bias=True), torch.Size([3, 2]), None)

    The module or tensor called `path` in `model`, None where there is none.
    """
    found: Any = model
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module | torch.Tensor) else None


def get_arg_info_from_tensor_fqn(model: nn.Module, tensor_fqn: str) -> dict[str, Any]:
    """
    >>> model = nn.Sequential(nn.Linear(2, 3))
    >>> info = get_arg_info_from_tensor_fqn(model, "0.weight")
    >>> info["module"] is model[0], info["module_fqn"], info["tensor_name"], info["tensor_fqn"]
    (True, '0', 'weight', '0.weight')

    The four keys by which a sparsifier's group names a tensor. "module" is None where the model has none so
    called; whether the module has the tensor is not looked at.
    """
    module_fqn, _, tensor_name = tensor_fqn.rpartition(".")
    return {
        "module_fqn": module_fqn,
        "module": fqn_to_module(model, module_fqn),
        "tensor_name": tensor_name,
        "tensor_fqn": tensor_fqn,
    }
