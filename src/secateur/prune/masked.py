"""The masked weight that a pruned module computes with: made once, and again only when it has to be."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.prune.watch import Stamp, ordinary, unchanged, watch

_MADE = "_secateur_made"


def masked(orig: Tensor, mask: Tensor, grad: bool) -> Tensor:
    """`orig` with `mask` multiplied in, as a tensor that can be copied and pickled along with its module.

    >>> masked(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), grad=False)
    tensor([0., 2.])

    With `grad`, gradients flow back to `orig`. The result is an ordinary tensor even in inference mode, so
    that it can be kept for later.
    """
    mask = mask.to(dtype=orig.dtype)
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        weight = mask * orig
    # The result of an operation cannot be deep-copied, and pickling loses its graph: both go by recipe.
    vars(weight).update(
        __deepcopy__=partial(_deepcopied, orig, mask, grad), __reduce_ex__=partial(_reduced, orig, mask, grad)
    )
    return weight


def _deepcopied(orig: Tensor, mask: Tensor, grad: bool, memo: dict[int, Any]) -> Tensor:
    return masked(copy.deepcopy(orig, memo), copy.deepcopy(mask, memo), grad)


def _reduced(orig: Tensor, mask: Tensor, grad: bool, protocol: int) -> tuple[Callable[..., Tensor], Any]:
    return masked, (orig, mask, grad)


@dataclass(frozen=True)
class _Made:
    """The evidence by which a masked weight is still the right one; it lives on that weight."""

    orig: Tensor
    mask: Tensor
    grad: bool
    stamps: tuple[Stamp | None, Stamp | None, Stamp | None]


def make(orig: Tensor, mask: Tensor) -> Tensor:
    """The masked weight for the current grad mode, to be asked about with `holds` later."""
    if not (ordinary(orig) and ordinary(mask)):
        return mask.to(dtype=orig.dtype) * orig
    grad = orig.requires_grad and torch.is_grad_enabled()
    weight = masked(orig, mask, grad)
    if grad:  # a step will change it: to watch it would cost more than to make it again
        return weight
    stamps = (watch(orig), watch(mask), watch(weight))
    if None not in stamps:
        vars(weight)[_MADE] = _Made(orig, mask, grad, stamps)
    return weight


def holds(module: nn.Module, name: str) -> bool:
    """Whether the masked weight that `module` has is up to date: nothing that it depends on was touched.

    >>> from secateur import prune
    >>> layer = prune.identity(nn.Linear(1, 1), "weight")
    >>> with torch.no_grad():
    ...     _ = layer(torch.ones(1, 1))
    ...     before = holds(layer, "weight")
    ...     _ = layer.weight_orig.data.zero_()
    ...     before, holds(layer, "weight")
    (True, False)

    A weight that gradients flow through is never kept: a step is about to change it.
    """
    weight: Tensor | None = module.__dict__.get(name)
    orig, mask = module._parameters.get(name + "_orig"), module._buffers.get(name + "_mask")
    if weight is None or orig is None or mask is None:
        return False
    made: _Made | None = vars(weight).get(_MADE)
    return (
        made is not None
        and made.orig is orig
        and made.mask is mask
        and made.grad == (orig.requires_grad and torch.is_grad_enabled())
        and unchanged(orig, made.stamps[0])
        and unchanged(mask, made.stamps[1])
        and unchanged(weight, made.stamps[2])
    )
