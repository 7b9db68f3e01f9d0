"""Exchanging masked modules for the classes that know how to run them."""

import copy
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from secateur.ao.errors import SparsifierAssertionError, SparsifierAttributeError, SparsifierNotImplementedError
from secateur.ao.parametrization import module_contains_param

Mapped = Mapping[type[nn.Module], type[nn.Module]]


def convert(model: nn.Module, mapping: Mapped | None, inplace: bool, parametrization: type[nn.Module]) -> nn.Module:
    """Exchange the masked modules below `model`; see `BaseSparsifier.convert`."""
    if mapping is None:
        raise SparsifierNotImplementedError(
            "convert: no mapping; pass a dict from module types to types with a from_dense method"
        )
    model = model if inplace else copy.deepcopy(model)
    masked = [m for m in model.modules() if m is not model and module_contains_param(m, parametrization)]
    targets = {module: mapping.get(type_before_parametrizations(module)) for module in masked}
    swapped = {module: _swap(module, target) for module, target in targets.items() if target is not None}
    for parent in list(model.modules()):
        parent._modules.update({name: swapped[m] for name, m in parent._modules.items() if m in swapped})
    return model


def _swap(module: nn.Module, target: Any) -> nn.Module:
    if not hasattr(target, "from_dense"):
        raise SparsifierAttributeError(
            f"convert: {target.__name__} has no from_dense; map to a class with a from_dense(module) method"
        )
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    if len(devices) > 1:
        raise SparsifierAssertionError(
            f"convert: a {type(module).__name__} is spread over {sorted(map(str, devices))}; move it to one device"
        )
    new: nn.Module = target.from_dense(module)
    for pre_hook in module._forward_pre_hooks.values():
        new.register_forward_pre_hook(pre_hook)
    for hook in module._forward_hooks.values():
        new.register_forward_hook(hook)
    return new.to(devices.pop()) if devices else new
