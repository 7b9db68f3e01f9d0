"""Attributes that people read: `in_features`, `out_channels` and the like, kept true to the weights."""

from __future__ import annotations

from torch import Tensor, nn

from secateur.trace.readable import readable


def refresh(model: nn.Module) -> None:
    """Make the attributes of every known kind of module agree with its weights."""
    for module in model.modules():
        _recompute(module)
        for attribute, value in readable(module):
            if module.__dict__[attribute] != value:
                module.__dict__[attribute] = value


def _recompute(module: nn.Module) -> None:
    """A weight that a hook computes before each forward (from a mask, from length and direction) is computed anew."""
    for hook in module._forward_pre_hooks.values():
        name = str(getattr(hook, "_tensor_name", getattr(hook, "name", "")))
        made_of = (f"{name}_orig", f"{name}_g")
        if isinstance(module.__dict__.get(name), Tensor) and any(key in module._parameters for key in made_of):
            mode, module.training = module.training, False  # spectral norm takes a step when training
            try:
                hook(module, ())
            finally:
                module.training = mode
