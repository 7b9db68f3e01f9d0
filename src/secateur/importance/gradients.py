"""What the gradient of a loss says about positions: sums over everything that goes with each of them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.calibrate import call
from secateur.calibrate.blame import batch_name, blamed_on_batch, studied
from secateur.calibrate.data import each_own, no_batches
from secateur.distributed import totals
from secateur.errors import CalibrationError
from secateur.importance.criterion import JointCriterion
from secateur.importance.weights import Sums, Weights, as_real
from secateur.tracing.graph import Axis

Loss = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Taylor(JointCriterion):
    """The mean over batches of (Σ g·w)², summed over all weights that go with a position (Molchanov et al., 2019).

    >>> import secateur as sec, torch.nn.functional as F
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> batches = [(torch.randn(16, 4), torch.randint(2, (16,))) for _ in range(3)]
    >>> plan = sec.plan(sec.trace(net, batches[0][0]), sec.Ratio(0.5), importance=Taylor(batches, F.cross_entropy))
    >>> len(plan.axes[0].keep)
    4

    The sum is over every parameter that the cut touches: weights, biases and norms that make a position, and the
    weights that read it. `batches` is any iterable, or a function that makes one. `loss(model, batch)` gives a tensor
    with one element; a loss of torch's (a module, or a function of `torch.nn.functional`) is called with
    `model(inputs)` and `target` for batches that are pairs `(inputs, target)`. The model runs in eval mode and is left
    as it was.
    """

    batches: Any
    loss: Loss

    def scores(self, weights: Weights) -> dict[Axis, Tensor]:
        """The mean of (Σ g·w)² over batches."""
        return mean_over_batches(
            weights, self.batches, self.loss, "Taylor", of_weight=lambda products: products, of_position=torch.square
        )


@dataclass(frozen=True, eq=False)
class Hessian(JointCriterion):
    """Σ ½·h·w² over all weights that go with a position (LeCun et al., 1989), h being the mean of g² over batches.

    >>> import secateur as sec, torch.nn.functional as F
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> samples = [(torch.randn(1, 4), torch.randint(2, (1,))) for _ in range(16)]
    >>> plan = sec.plan(sec.trace(net, samples[0][0]), sec.Ratio(0.5), importance=Hessian(samples, F.cross_entropy))
    >>> len(plan.axes[0].keep)
    4

    The mean of squared gradients is the diagonal of the empirical Fisher matrix, which stands for that of the Hessian
    at a minimum of a log-likelihood. Every batch counts, as one sample of the gradient: batches of one give the Fisher
    matrix proper, larger ones a cheaper, noisier picture of it. `batches` and `loss` are those of `Taylor`.
    """

    batches: Any
    loss: Loss

    def scores(self, weights: Weights) -> dict[Axis, Tensor]:
        """The mean of Σ ½·(g·w)² over batches."""
        return mean_over_batches(
            weights, self.batches, self.loss, "Hessian", of_weight=torch.square, of_position=lambda sums: sums / 2
        )


def mean_over_batches(
    weights: Weights,
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
    dims = weights.dims()
    wanted = {name: weights.parameters[name] for name in dims}
    wanted = {name: p for name, p in wanted.items() if p.is_floating_point() or p.is_complex()}
    seen = 0
    with studied(weights.model, what), torch.enable_grad():
        for parameter in wanted.values():  # frozen ones too; afterwards they are as they were
            parameter.requires_grad_(True)
        sums_of = {axis: torch.zeros(axis.size, dtype=torch.float64) for axis in weights.axes}
        for seen, batch in enumerate(each_own(batches, what), start=1):
            gradients = _gradients(weights.model, loss, batch, wanted, what, seen - 1)
            found = {name: _sums(g, wanted[name], dims[name], of_weight) for name, g in gradients.items()}
            del gradients
            sums = _on_host(found)
            for axis, scores in weights.gather(lambda name, *_, sums=sums: sums.get(name, {})).items():
                if not scores.isfinite().all():
                    where = f"{what}: the gradient on batch {seen}"
                    raise CalibrationError(f"{where} is not finite at {axis.name}, though the loss is")
                sums_of[axis] += of_position(scores)
    *every, count = totals(what, [*sums_of.values(), torch.tensor(seen)])
    if not count:
        raise no_batches(what)
    return {axis: total / int(count) for axis, total in zip(sums_of, every, strict=True)}


def _sums(gradient: Tensor, weight: Tensor, dims: Sequence[int], of_weight: Callable[[Tensor], Tensor]) -> Sums:
    """Σ of_weight(g · w) of each slice of a parameter."""
    precise = torch.promote_types(gradient.dtype, torch.float32)
    products = of_weight(as_real(gradient.to_dense().to(precise)) * as_real(weight.detach().to(precise)))
    found = {}
    for dim in dims:
        others = [d for d in range(products.ndim) if d != dim]
        found[dim] = products.sum(others, dtype=torch.float64) if others else products.to(torch.float64)
    return found


def _on_host(found: Mapping[str, Sums]) -> dict[str, dict[int, Tensor]]:
    """Sums of each parameter on the CPU: from each device in one piece, for which the host waits once."""
    made: dict[str, dict[int, Tensor]] = {name: {} for name in found}
    every = {(name, dim): each for name, sums in found.items() for dim, each in sums.items()}
    for device in dict.fromkeys(each.device for each in every.values()):
        here = {key: each for key, each in every.items() if each.device == device}
        pieces = torch.cat(list(here.values())).cpu().split([len(each) for each in here.values()])
        for (name, dim), piece in zip(here, pieces, strict=True):
            made[name][dim] = piece
    return made


def _gradients(
    model: nn.Module, loss: Loss, batch: Any, weights: Mapping[str, Tensor], what: str, number: int
) -> dict[str, Tensor]:
    """The gradient of the loss of one batch, by parameter; none for those that have no part in it."""
    asked = "loss(model(inputs), target)" if _is_torch_loss(loss) else "loss(model, batch)"
    with blamed_on_batch(number, what, asked):
        value = _value(loss, model, batch)
        _check(value, f"{what}: {asked} on {batch_name(number)}")
        # the graph is retained: a model may cache a part of it for its next run
        found = torch.autograd.grad(value.sum(), list(weights.values()), allow_unused=True, retain_graph=True)
    gradients = {name: gradient for name, gradient in zip(weights, found, strict=True) if gradient is not None}
    if not gradients:
        raise CalibrationError(f"{what}: {asked} on {batch_name(number)} depends on no parameter that could be cut")
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
