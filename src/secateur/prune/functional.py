"""Prune one parameter of one module, in one call."""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from secateur.errors import PruneAttributeError, PruneValueError
from secateur.prune.checks import check_module, located, place
from secateur.prune.methods import (
    CustomFromMask,
    Identity,
    L1Unstructured,
    LnStructured,
    RandomStructured,
    RandomUnstructured,
)
from secateur.prune.state import find_hook


def identity(module: nn.Module, name: str) -> nn.Module:
    """Reparameterise a parameter without pruning anything.

    >>> identity(nn.Linear(2, 3), "bias").bias_mask
    tensor([1., 1., 1.])

    Like every function here it works in place and returns the module: the parameter `name` becomes
    `name_orig`, a buffer `name_mask` of its shape and dtype joins it, and `name` is their product.
    """
    Identity.apply(module, name)
    return module


def random_unstructured(module: nn.Module, name: str, amount: Any) -> nn.Module:
    """Prune entries at random.

    >>> layer = random_unstructured(nn.Linear(2, 3), "weight", amount=1)
    >>> int((layer.weight_mask == 0).sum())
    1

    `amount` is a fraction (float) or a count (int) of the entries that are not pruned yet.
    """
    RandomUnstructured.apply(module, name, amount)
    return module


def l1_unstructured(module: nn.Module, name: str, amount: Any, importance_scores: Tensor | None = None) -> nn.Module:
    """Prune the entries of smallest magnitude.

    >>> layer = l1_unstructured(nn.Linear(4, 4), "weight", amount=0.25)
    >>> int((layer.weight == 0).sum())
    4

    `amount` is a fraction (float) or a count (int) of the entries that are not pruned yet; exactly that many
    go. `importance_scores`, of the parameter's shape, take the place of the weights.
    """
    L1Unstructured.apply(module, name, amount=amount, importance_scores=importance_scores)
    return module


def random_structured(module: nn.Module, name: str, amount: Any, dim: int) -> nn.Module:
    """Prune whole channels along `dim` at random.

    >>> layer = random_structured(nn.Linear(5, 3), "weight", amount=3, dim=1)
    >>> int((layer.weight_mask.sum(dim=0) == 0).sum())
    3

    `amount` is a fraction (float) or a count (int) of the channels that are not wholly pruned yet.
    """
    RandomStructured.apply(module, name, amount, dim)
    return module


def ln_structured(
    module: nn.Module, name: str, amount: Any, n: Any, dim: int, importance_scores: Tensor | None = None
) -> nn.Module:
    """Prune the channels along `dim` that have the smallest L_n norm.

    >>> layer = ln_structured(nn.Conv2d(5, 4, 2), "weight", amount=0.25, n=2, dim=0)
    >>> int((layer.weight_mask.flatten(1).sum(dim=1) == 0).sum())
    1

    `amount` is a fraction (float) or a count (int) of the channels that are not wholly pruned yet. `n` is any
    order that `torch.linalg.vector_norm` takes, or 'fro', or 'nuc'. `importance_scores`, of the parameter's
    shape, take the place of the weights.
    """
    LnStructured.apply(module, name, amount, n, dim, importance_scores=importance_scores)
    return module


def custom_from_mask(module: nn.Module, name: str, mask: Tensor) -> nn.Module:
    """Prune by a given mask.

    >>> import torch
    >>> custom_from_mask(nn.Linear(5, 3), "bias", torch.tensor([0, 1, 0])).bias_mask
    tensor([0., 1., 0.])
    """
    CustomFromMask.apply(module, name, mask)
    return module


def remove(module: nn.Module, name: str) -> nn.Module:
    """Make pruning permanent: the parameter holds the masked values, and mask, hook and original are gone.

    >>> layer = l1_unstructured(nn.Linear(2, 1), "weight", amount=1)
    >>> sorted(remove(layer, "weight").state_dict())
    ['bias', 'weight']

    The parameter stays the same object, so optimisers keep working. Takes off torch's own pruning, too.
    """
    with located(place(module, name)):
        check_module(module, name)
        key, hook = find_hook(module, name)
        if key is None:
            raise PruneValueError("it is not pruned, so there is nothing to remove; see prune.is_pruned")
        hook.remove(module)
        del module._forward_pre_hooks[key]
    return module


def is_pruned(module: nn.Module) -> bool:
    """Whether any parameter in `module` or below has a pruning hook, of this library or of torch.

    >>> layer = nn.Linear(2, 1)
    >>> is_pruned(layer), is_pruned(identity(layer, "weight"))
    (False, True)
    """
    if not isinstance(module, nn.Module):
        raise PruneAttributeError(f"a {type(module).__name__} is not a module; pass an nn.Module")
    hooks = (hook for part in module.modules() for hook in part._forward_pre_hooks.values())
    return any(isinstance(hook, torch_prune.BasePruningMethod) for hook in hooks)
