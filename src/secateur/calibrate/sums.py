"""Sums over batches that stay on the device of what is added: to read one is to wait for all that went into it."""

from torch import Tensor


def added(known: Tensor, part: Tensor) -> Tensor:
    """A sum and one more part of it, in the precision of the sum and where the part is; in place where that goes.

    >>> import torch
    >>> sums = torch.zeros(1, dtype=torch.float64)  # of any shape, so far
    >>> for _ in range(3):
    ...     sums = added(sums, torch.ones(2))
    >>> sums
    tensor([3., 3.], dtype=torch.float64)
    """
    known = known.to(part.device)
    if known.shape != part.shape:
        return known + part
    known += part
    return known


__all__ = ["added"]
