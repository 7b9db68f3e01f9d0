"""What the gradient of a loss says about positions: sums over everything that goes with each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.calibrate import call
from secateur.errors import CalibrationError, SecateurError
from secateur.importance.batches import each, failed, studied
from secateur.importance.gather import Context, collect
from secateur.trace.graph import Axis

Loss = Callable[..., Tensor]
Sums = Mapping[tuple[str, int], Tensor]  # (tensor, dim) -> one number per index


def mean_over_batches(
    context: Context,
    batches: Any,
    loss: Loss,
    what: str,
    *,
    of_weight: Callable[[Tensor], Tensor],
    of_position: Callable[[Tensor], Tensor],
) -> dict[Axis, Tensor]:
    """For every axis, the mean over batches of `of_position(Σ of_weight(g · w))`, summed over all that goes with it.

    One batch's gradient is held at a time, and one number per position of each axis.
    """
    contexts = [replace(context, axis=axis) for axis in context.graph.axes]
    wanted = _wanted(contexts)
    seen = 0
    with studied(context.model, what), _differentiable(context, wanted) as weights:
        totals = {c.axis: torch.zeros(c.axis.size, dtype=torch.float64) for c in contexts}
        for seen, batch in enumerate(each(batches, what), start=1):
            sums = _sums(wanted, weights, _gradients(context.model, loss, batch, weights, what, seen), of_weight)
            for c in contexts:
                totals[c.axis] += of_position(_collected(c, sums, f"{what}: the gradient on batch {seen}"))
    return {axis: total / seen for axis, total in totals.items()}


def _collected(context: Context, sums: Sums, where: str) -> Tensor:
    scores = collect(context, lambda site, _: sums.get((site.tensor, site.dim)))
    if not scores.isfinite().all():
        raise CalibrationError(f"{where} is not finite at {context.axis.name}, though the loss is")
    return scores


def _wanted(contexts: list[Context]) -> dict[str, set[int]]:
    """The dimensions of each floating-point parameter that some axis is part of."""
    found: dict[str, set[int]] = {}
    for context in contexts:
        for site, parameter in context.sites():
            if parameter.is_floating_point():
                found.setdefault(site.tensor, set()).add(site.dim)
    return found


@contextmanager
def _differentiable(context: Context, names: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """The parameters of these names with a gradient to be had, frozen ones too."""
    weights = {name: context.parameters[name] for name in names}
    frozen = [weight for weight in weights.values() if not weight.requires_grad]
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        with torch.enable_grad():
            yield weights
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


def _gradients(
    model: nn.Module, loss: Loss, batch: Any, weights: Mapping[str, Tensor], what: str, number: int
) -> dict[str, Tensor]:
    """The gradient of the loss of one batch, by parameter; none for those that have no part in it."""
    asked = "loss(model(inputs), target)" if _is_torch_loss(loss) else "loss(model, batch)"
    try:
        value = _value(loss, model, batch)
        _check(value, f"{what}: {asked} on batch {number}")
        # the graph is retained: a model may cache a part of it for its next run
        found = torch.autograd.grad(value.sum(), list(weights.values()), allow_unused=True, retain_graph=True)
    except SecateurError:
        raise
    except Exception as error:  # any code of the user's may run here
        raise failed(what, number, asked, error) from error
    gradients = {name: gradient for name, gradient in zip(weights, found, strict=True) if gradient is not None}
    if not gradients:
        raise CalibrationError(f"{what}: {asked} on batch {number} depends on no parameter that could be cut")
    return gradients


def _is_torch_loss(loss: Loss) -> bool:
    """Whether a loss takes outputs and targets: a module, or a function of torch.nn.functional."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return isinstance(loss, nn.Module) or any(loss is known for known in vars(F).values())


def _value(loss: Loss, model: nn.Module, batch: Any) -> Any:
    if not _is_torch_loss(loss):
        return loss(model, batch)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(f"a batch is a pair (inputs, target), not a {type(batch).__name__}")
    inputs, target = batch
    return loss(call(model, inputs), target)


def _check(value: Any, where: str) -> None:
    if not isinstance(value, Tensor):
        raise CalibrationError(f"{where} is a {type(value).__name__}, not a tensor with one element")
    if value.numel() != 1:
        raise CalibrationError(f"{where} has the shape {tuple(value.shape)}: take its mean or its sum")
    if not value.isfinite().all():
        raise CalibrationError(f"{where} is {value.item()}: a batch or a weight is not finite, or too large")
    if not value.requires_grad:
        raise CalibrationError(f"{where} has no gradient: was the model run under no_grad, or its output detached?")


def _sums(
    wanted: Mapping[str, set[int]],
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    of_weight: Callable[[Tensor], Tensor],
) -> Sums:
    """Σ of_weight(g · w) of each slice, one parameter at a time."""
    sums = {}
    for name, gradient in gradients.items():
        precise = torch.promote_types(gradient.dtype, torch.float32)
        products = of_weight(gradient.to_dense().to(precise) * weights[name].detach().to(precise))
        for dim in wanted[name]:
            others = [d for d in range(products.ndim) if d != dim]
            sliced = products.sum(others, dtype=torch.float64) if others else products.to(torch.float64)
            sums[name, dim] = sliced.cpu()
    return sums
