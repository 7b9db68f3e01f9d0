"""What goes on before and after each step of an optimizer, whoever calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import TrainingError


def inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of what accelerate and Lightning wrap around it."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        within = getattr(optimizer, "optimizer", None)
        if within is None:
            raise TrainingError(f"an optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}")
        optimizer = within
    return optimizer


def check_knows(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer that does not train some parameters."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        if parameter.requires_grad and id(parameter) not in known:
            raise TrainingError(
                f"{type(optimizer).__name__} does not have {name} among its parameters: it was made for another model, "
                "or before this one was changed; make it from `model.parameters()`"
            )


def check_trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that has no parameter of a model."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if known.isdisjoint(map(id, model.parameters())):
        raise TrainingError(
            f"{type(optimizer).__name__} has none of the parameters of {type(model).__name__}: it was made for another "
            "model; make it from `model.parameters()`"
        )


def check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Refuse the first step of a loss that is no number, while nothing has changed."""
    if getattr(optimizer, "found_inf", None) is not None:  # a GradScaler has the optimizer itself leave such steps out
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and not bool(_values(p.grad).isfinite().all()):
                raise TrainingError(
                    f"a gradient of shape {tuple(p.shape)} holds NaN or infinity before the first step: the loss was "
                    "no number; look at the data, the model and the loss"
                )


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def hooked(
    optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]
) -> Callable[[], None]:
    """Call something before and something after each step; the function that is returned ends that."""
    handles = [
        optimizer.register_step_pre_hook(lambda *_: before()),
        optimizer.register_step_post_hook(lambda *_: after()),
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
