"""Other contents for a tensor that stays the object it is, for all who hold it."""

import torch
from torch import Tensor, nn


def put_contents(tensor: Tensor, data: Tensor, grad: Tensor | None = None) -> None:
    """Give a tensor other data, of any shape, and the gradient that belongs to it.

    >>> weight = nn.Parameter(torch.zeros(4, 2))
    >>> held = [weight]
    >>> put_contents(weight, torch.ones(1, 2))
    >>> held[0]
    Parameter containing:
    tensor([[1., 1.]], requires_grad=True)

    Autograd keeps one node per leaf for as long as any graph holds it (that of the last loss, say), with the shape that
    the leaf had. It makes a new one when the dtype changes, so the dtype changes on the way.
    """
    if tensor.is_leaf:
        tensor.grad = None  # of the other shape or type
        if tensor.requires_grad:
            other = torch.float32 if tensor.dtype is not torch.float32 else torch.float64
            tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = data
    if grad is not None:
        tensor.grad = grad


def alias(tensor: Tensor) -> Tensor:
    """Another tensor with the same memory: one that stays as it is when the first gets other contents.

    >>> weight = nn.Parameter(torch.zeros(1))
    >>> whole = alias(weight)
    >>> put_contents(weight, torch.ones(1))
    >>> whole
    Parameter containing:
    tensor([0.], requires_grad=True)
    """
    other = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
        other.__dict__.update(tensor.__dict__)
    return other


__all__ = ["alias", "put_contents"]
