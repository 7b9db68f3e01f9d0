"""Attributes that people read: `in_features`, `out_channels` and the like, kept true to the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from secateur.tracing.widths import told_widths


def refresh(model: nn.Module) -> None:
    """Make the attributes of every known kind of module agree with its weights."""
    with _reading(model):
        for module in model.modules():
            _recompute(module)
            for attribute, value in told_widths(module):
                if module.__dict__[attribute] != value:
                    module.__dict__[attribute] = value


@contextmanager
def _reading(model: nn.Module) -> Iterator[None]:
    """Weights that are computed when they are read stay as they are: in training mode spectral norm takes a step."""
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.__dict__["training"] = False
        yield
    finally:
        for module, mode in modes.items():
            module.__dict__["training"] = mode


def _recompute(module: nn.Module) -> None:
    """A weight that a hook computes before each forward (from a mask, from length and direction) is computed anew."""
    for hook in module._forward_pre_hooks.values():
        name = str(getattr(hook, "_tensor_name", getattr(hook, "name", "")))
        made_of = (f"{name}_orig", f"{name}_g")
        before = module.__dict__.get(name)
        if isinstance(before, Tensor) and any(key in module._parameters for key in made_of):
            with torch.set_grad_enabled(before.requires_grad):  # with a graph it could not be copied
                hook(module, ())
