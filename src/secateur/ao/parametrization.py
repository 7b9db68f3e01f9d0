"""How a mask sits on a tensor: parametrizations that multiply by it, and the hook that adds the bias."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from secateur.ao.errors import SparsifierAssertionError, SparsifierAttributeError, SparsifierTypeError
from secateur.compat import AttentionOutput
from secateur.distributed import spread_like


class _Mask(nn.Module):
    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        if not isinstance(mask, Tensor):
            raise SparsifierTypeError(
                f"{type(self).__name__}: the mask is a {type(mask).__name__}; pass a torch.Tensor"
            )
        # Masks travel in the sparsifier's state_dict, so the model's own has the same keys for every mask.
        self.register_buffer("mask", mask, persistent=False)

    def _fitting(self, shape: torch.Size, x: Tensor, what: str) -> Tensor:
        """The mask, if it has the shape that `x` needs."""
        if self.mask.shape != shape:
            raise SparsifierAssertionError(
                f"{type(self).__name__}: the mask is {tuple(self.mask.shape)} and the tensor {tuple(x.shape)}; "
                f"pass {what}, or prepare again if the model has changed"
            )
        return self.mask


class FakeSparsity(_Mask):
    """
    >>> layer = nn.Linear(2, 2, bias=False)
    >>> mask = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> _ = nn.utils.parametrize.register_parametrization(layer, "weight", FakeSparsity(mask))
    >>> bool((layer.weight[mask == 0] == 0).all())
    True

    Multiplies a tensor by a mask of the same shape. The mask's values may change at any time; the model's
    state_dict does not hold them.
    """

    def forward(self, x: Tensor) -> Tensor:
        return spread_like(self._fitting(x.shape, x, "a mask of the tensor's shape"), x) * x


class FakeStructuredSparsity(_Mask):
    """
    >>> layer = nn.Linear(3, 2, bias=False)
    >>> rows = FakeStructuredSparsity(torch.tensor([True, False]))
    >>> _ = nn.utils.parametrize.register_parametrization(layer, "weight", rows)
    >>> bool((layer.weight[1] == 0).all())
    True

    Multiplies each row (index along dim 0) of a tensor by one entry of a 1-d mask.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self._fitting(x.shape[:1], x, "one value per row").reshape(-1, *[1] * (x.dim() - 1)) * x


class BiasHook:
    """
    >>> layer = nn.Linear(2, 2)
    >>> layer._bias, layer.bias = nn.Parameter(torch.ones(2)), None
    >>> hook = BiasHook(FakeStructuredSparsity(torch.tensor([True, False])), prune_bias=True)
    >>> _ = layer.register_forward_hook(hook)
    >>> layer(torch.zeros(1, 2))
    tensor([[1., 0.]], grad_fn=<AddBackward0>)

    A forward hook that adds a module's `_bias` to its output along the channels: all of it, or with
    `prune_bias` only the entries of rows that the mask keeps. The parameter itself is left alone, so a row
    that comes back finds its bias.
    """

    def __init__(self, parametrization: nn.Module, prune_bias: bool) -> None:
        self.param: Any = parametrization
        self.prune_bias = prune_bias

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        bias: Tensor | None = getattr(module, "_bias", None)
        if bias is None:
            return output
        if self.prune_bias:
            bias = bias * self.param.mask
        shape = [1] * output.dim()
        shape[_channel_dim(module)] = -1
        return output + bias.reshape(shape)


def _channel_dim(module: nn.Module) -> int:
    if isinstance(module, nn.Linear):
        return -1
    kernel = getattr(module, "kernel_size", None)
    # Counted from the end, which holds for unbatched input too.
    return 1 if kernel is None else -len(kernel) - 1


def is_called(module: nn.Module) -> bool:
    """Whether a layer runs by its own forward, so that a hook on it can add the bias.

    The output projection of nn.MultiheadAttention does not: attention reads its weight and bias.
    """
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return isinstance(module, layers) and not isinstance(module, AttentionOutput)


def module_contains_param(module: nn.Module, parametrization: type[nn.Module]) -> bool:
    """
    >>> layer = nn.Linear(2, 2)
    >>> module_contains_param(layer, FakeSparsity)
    False
    >>> _ = nn.utils.parametrize.register_parametrization(layer, "weight", FakeSparsity(torch.ones(2, 2)))
    >>> module_contains_param(layer, FakeSparsity)
    True

    Whether any tensor of the module carries a parametrization of this type.
    """
    stacks: Any = module.parametrizations.values() if is_parametrized(module) else ()  # type: ignore[operator]
    return any(isinstance(p, parametrization) for stack in stacks for p in stack)


def parametrizations(module: nn.Module, tensor_name: str) -> Iterable[nn.Module]:
    """What sits on a tensor of the module."""
    return module.parametrizations[tensor_name] if is_parametrized(module, tensor_name) else ()  # type: ignore


def find_mask(module: nn.Module, tensor_name: str) -> Tensor | None:
    """The mask that sits on a tensor of the module, None where there is none."""
    masks = (getattr(p, "mask", None) for p in parametrizations(module, tensor_name))
    return next((mask for mask in masks if isinstance(mask, Tensor)), None)


def mask_of(module: nn.Module, tensor_name: str) -> Tensor:
    """The mask that sits on a tensor of the module."""
    mask = find_mask(module, tensor_name)
    if mask is None:
        raise SparsifierAttributeError(
            f"{tensor_name} of {type(module).__name__} carries no mask; call prepare() first, "
            "and again after squash_mask() or after replacing the module"
        )
    return mask


def unmasked(module: nn.Module, tensor_name: str) -> Tensor:
    """A parametrized tensor as it would be without its row masks."""
    stack: Any = module.parametrizations[tensor_name]  # type: ignore[index]
    values = [stack.original] if stack.is_tensor else [getattr(stack, f"original{i}") for i in range(stack.ntensors)]
    for parametrization in stack:
        if not isinstance(parametrization, FakeStructuredSparsity):
            values = [parametrization(*values)]
    return values[0]
