"""Pruners that mask given rows, and what is checked about every removal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur import ao

Off = Mapping[str, Sequence[int]]


class _Rows:
    """Masks the rows that its config entries name under "off"."""

    def update_mask(self, module: nn.Module, tensor_name: str, off: Sequence[int] = (), **_: Any) -> None:
        module.parametrizations[tensor_name][0].mask[list(off)] = False


def rows_pruner(base: Any, model: nn.Module, off: Off, **defaults: Any) -> Any:
    """A pruner of our `BaseStructuredSparsifier` or torch's that has masked the rows `off` of each tensor."""
    pruner = type("Rows", (_Rows, base), {})(defaults)
    pruner.prepare(model, [{"tensor_fqn": name, "off": rows} for name, rows in off.items()])
    pruner.step()
    return pruner


def masked(model: nn.Module, off: Off, **defaults: Any) -> Any:
    """Our pruner, with the rows `off` of each tensor of the model masked."""
    return rows_pruner(ao.BaseStructuredSparsifier, model.eval(), off, **defaults)


def prune_like_masked(model: nn.Module, off: Off, *args: Tensor, **defaults: Any) -> Any:
    """Mask and remove rows; the model must then put out what it did while they were masked. Returns the pruner."""
    pruner = masked(model, off, **defaults)
    with torch.no_grad():
        want = model(*args)
        assert pruner.prune() is model
        torch.testing.assert_close(model(*args), want, rtol=1e-4, atol=1e-5)
    assert not any(hasattr(module, "parametrizations") or hasattr(module, "_bias") for module in model.modules())
    return pruner


def random_norms(model: nn.Module) -> nn.Module:
    """Give every batch norm statistics and parameters that matter."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
