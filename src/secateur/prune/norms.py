"""How large a channel is: its norm over all other dimensions, and that norm made comparable across layers."""

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from secateur.prune.checks import _validate_pruning_dim
from secateur.prune.errors import PruneRuntimeError, PruneTypeError, PruneValueError


def _compute_norm(t: Tensor, n: Any, dim: int) -> Tensor:
    """The L_n norm of every slice of `t` along `dim`.

    >>> _compute_norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), n=2, dim=0)
    tensor([5., 1.])

    `n` is any order that `torch.linalg.vector_norm` takes, or 'fro' (the same as 2), or 'nuc': the sum of the
    singular values of the slice as a matrix, its first dimension by all the others.
    """
    _validate_pruning_dim(t, dim)
    t = t.detach()
    if not (t.is_floating_point() or t.is_complex()):
        t = t.to(torch.get_default_dtype())
    order = _order(n)
    if order == "nuc":
        return torch.linalg.matrix_norm(_as_matrices(t, dim), ord="nuc")
    others = [d for d in range(t.dim()) if d != dim % t.dim()]
    return torch.linalg.vector_norm(t, order, dim=others)


def normalized_norm(t: Tensor, n: Any, dim: int) -> Tensor:
    """The norm of every slice, divided by that of a slice of ones, so that slices of all sizes compare.

    >>> normalized_norm(torch.full((2, 9), 0.5), n=2, dim=0)
    tensor([0.5000, 0.5000])

    For the nuclear norm the divisor is the largest that entries of magnitude one can reach.
    """
    norm = _compute_norm(t, n, dim)
    size = max(t.numel() // max(t.shape[dim], 1), 1)
    order = _order(n)
    if order == "nuc":
        rows, columns = _as_matrices(t, dim).shape[1:]
        return norm / math.sqrt(size * max(min(rows, columns), 1))
    if order == 0 or math.isinf(order):
        return norm / (size if order == 0 else 1)
    return norm / size ** (1 / order)


def _order(n: Any) -> Any:
    if n is None or n == "fro":
        return 2.0
    if n == "nuc":
        return n
    if isinstance(n, str):
        raise PruneRuntimeError(f"n={n!r} is not a norm; pass a number, inf, -inf, 'fro' or 'nuc'")
    if not isinstance(n, numbers.Real):
        raise PruneTypeError(f"n={n!r} is a {type(n).__name__}; pass a number, inf, -inf, 'fro' or 'nuc'")
    if math.isnan(n):
        raise PruneValueError("n is NaN; pass a number, inf, -inf, 'fro' or 'nuc'")
    return float(n)


def _as_matrices(t: Tensor, dim: int) -> Tensor:
    slices = t.movedim(dim, 0)
    if slices.dim() == 2:
        return slices.unsqueeze(1)
    return slices.flatten(2)
