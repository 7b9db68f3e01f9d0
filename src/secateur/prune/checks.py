"""Is what was asked for possible? Every check of an argument, each raising before anything has changed."""

import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from secateur.compat import is_lazy
from secateur.prune.errors import (
    PruneAttributeError,
    PruneError,
    PruneIndexError,
    PruneParameterError,
    PruneShapeError,
    PruneTypeError,
    PruneValueError,
)


def _validate_pruning_amount_init(amount: Any) -> None:
    """Refuse an amount that is wrong for any tensor.

    >>> _validate_pruning_amount_init(0.5)
    >>> _validate_pruning_amount_init(1.5)
    Traceback (most recent call last):
    secateur.prune.errors.PruneValueError: amount=1.5 ...

    A float is a fraction from 0 to 1, an integer a count from 0 up.
    """
    if not isinstance(amount, numbers.Real):
        raise PruneTypeError(
            f"amount={amount!r} is a {type(amount).__name__}; pass a fraction (float) or a count (int)"
        )
    if isinstance(amount, numbers.Integral):
        if int(amount) < 0:
            raise PruneValueError(f"amount={amount} is a negative count; pass 0 or more")
    elif not 0.0 <= float(amount) <= 1.0:
        raise PruneValueError(f"amount={amount} is not a fraction from 0 to 1; pass one, or an int to give a count")


def _validate_pruning_amount(amount: Any, tensor_size: int) -> None:
    """Refuse a count that is larger than what is there.

    >>> _validate_pruning_amount(3, tensor_size=4)
    >>> _validate_pruning_amount(5, tensor_size=4)
    Traceback (most recent call last):
    secateur.prune.errors.PruneValueError: amount=5 ...
    """
    if isinstance(amount, numbers.Integral) and int(amount) > tensor_size:
        raise PruneValueError(
            f"amount={amount} is more than the {tensor_size} that are left to prune; "
            f"pass at most {tensor_size}, or a fraction"
        )


def _compute_nparams_toprune(amount: Any, tensor_size: int) -> int:
    """The amount as a count.

    >>> _compute_nparams_toprune(0.4, tensor_size=17)
    7
    >>> _compute_nparams_toprune(4, tensor_size=17)
    4
    """
    if isinstance(amount, numbers.Integral):
        return int(amount)
    return round(amount * tensor_size)


def count_to_prune(amount: Any, size: int) -> int:
    """The amount as a count that is possible."""
    count = _compute_nparams_toprune(amount, size)
    _validate_pruning_amount(count, size)
    return count


def _validate_structured_pruning(t: Tensor) -> None:
    """Refuse a tensor that has no channels.

    >>> import torch
    >>> _validate_structured_pruning(torch.ones(3))
    Traceback (most recent call last):
    secateur.prune.errors.PruneValueError: ...
    """
    if t.dim() <= 1:
        raise PruneValueError(
            f"a tensor of shape {tuple(t.shape)} has no channels to prune; "
            "structured pruning needs two dimensions or more, use an unstructured method here"
        )


def _validate_pruning_dim(t: Tensor, dim: Any) -> None:
    """Refuse a dimension that the tensor does not have.

    >>> import torch
    >>> _validate_pruning_dim(torch.ones(3, 2), dim=-1)
    >>> _validate_pruning_dim(torch.ones(3, 2), dim=2)
    Traceback (most recent call last):
    secateur.prune.errors.PruneIndexError: dim=2 ...
    """
    if not isinstance(dim, numbers.Integral):
        raise PruneTypeError(f"dim={dim!r} is a {type(dim).__name__}; pass an int")
    if not -t.dim() <= int(dim) < t.dim():
        raise PruneIndexError(f"dim={dim} is out of range for shape {tuple(t.shape)}; pass {-t.dim()} to {t.dim() - 1}")


def check_scores(scores: Any, like: Tensor, what: str = "importance_scores") -> Tensor:
    """`scores`, if they are a tensor of the shape of `like`."""
    if not isinstance(scores, Tensor):
        raise PruneAttributeError(f"{what} is a {type(scores).__name__}; pass a tensor")
    if scores.shape != like.shape:
        raise PruneShapeError(
            f"{what} has shape {tuple(scores.shape)}; pass one score per entry, shape {tuple(like.shape)}"
        )
    return scores


def check_no_nan(t: Tensor, what: str) -> None:
    """Refuse NaN: it has no rank, and zero times NaN is not zero.

    >>> import torch
    >>> check_no_nan(torch.tensor([1.0, float("nan")]), "the weight")
    Traceback (most recent call last):
    secateur.prune.errors.PruneValueError: the weight contains NaN...
    """
    t = t.detach()
    if t.numel() == 0 or t.is_meta or not (t.is_complex() or t.is_floating_point()):
        return
    if not t.is_complex():  # a NaN anywhere is the minimum: one pass, nothing allocated
        t = (t if t.dtype.itemsize > 1 else t.float()).amin()
    if bool(t.isnan().any()):
        raise PruneValueError(f"{what} contains NaN, which cannot be ranked; repair or replace it before pruning")


def check_module(module: Any, name: Any) -> None:
    """Refuse what is not a module, and a name that is not a string."""
    if not isinstance(module, nn.Module):
        raise PruneAttributeError(f"a {type(module).__name__} is not a module; pass the nn.Module that owns {name!r}")
    if not isinstance(name, str):
        raise PruneTypeError(f"name={name!r} is a {type(name).__name__}; pass the parameter's name as a string")


def check_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter `name` of `module`, if it is one and the names that pruning needs are free."""
    parameter = module._parameters.get(name)
    if parameter is None:
        what = "is None" if name in module._parameters else "is not a parameter"
        names = ", ".join(n for n, p in module._parameters.items() if p is not None) or "none"
        raise PruneParameterError(f"{name!r} {what}; its parameters are: {names}")
    if is_lazy(parameter):
        raise PruneValueError("is not initialised yet; run the module once before pruning it")
    for taken in (name + "_orig", name + "_mask"):
        if hasattr(module, taken):
            raise PruneValueError(f"the module already has a {taken!r}, which pruning needs; rename it first")
    return parameter


def place(module: Any, name: Any) -> str:
    """How an error names a parameter."""
    return f"{type(module).__name__}.{name}"


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where` in front of whatever pruning error is raised inside."""
    try:
        yield
    except PruneError as error:
        raise type(error)(f"{where}: {error}") from error.__cause__
