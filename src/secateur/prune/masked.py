"""The masked weight that a pruned module computes with: made once, and again only when it has to be."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.prune.watch import ordinary, unchanged, watch

_MADE = "_secateur_made"  # on a masked weight: what it was made from, and the stamps of these and of itself


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
        vars(weight)[_MADE] = (orig, mask), stamps
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
    if weight is None or orig is None or mask is None or (orig.requires_grad and torch.is_grad_enabled()):
        return False
    sources, stamps = vars(weight).get(_MADE, (None, None))
    if sources is None or sources[0] is not orig or sources[1] is not mask:
        return False
    return all(map(unchanged, (orig, mask, weight), stamps))
