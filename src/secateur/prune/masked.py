"""The masked weight that a pruned module computes with: made once, and again only when it has to be."""

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import PruneRuntimeError
from secateur.prune.watch import Stamp, unchanged, watch


class _Multiply(torch.autograd.Function):
    """`orig * mask`. Its graph saves no tensors, so one weight serves any number of backward passes."""

    @staticmethod
    def forward(ctx: Any, orig: Tensor, mask: Tensor) -> Tensor:
        ctx.mask, ctx.version = mask, mask._version
        return mask * orig

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.mask._version != ctx.version:
            raise PruneRuntimeError(
                "a pruning mask was modified in place between forward and backward; run forward again first"
            )
        return grads[0] * ctx.mask, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0] * ctx.mask


def masked(orig: Tensor, mask: Tensor, grad: bool) -> Tensor:
    """`orig` with `mask` multiplied in, as a tensor that can be copied and pickled along with its module.

    >>> masked(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), grad=False)
    tensor([0., 2.])

    With `grad`, gradients flow back to `orig`. The result is an ordinary tensor even in inference mode, so
    that it can be kept for later.
    """
    mask = mask.to(dtype=orig.dtype)
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        weight = _Multiply.apply(orig, mask) if grad else mask * orig
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
class Made:
    """A masked weight, and the evidence by which it is still the right one."""

    weight: weakref.ref[Tensor]
    orig: weakref.ref[Tensor]
    grad: bool
    stamps: tuple[Stamp, Stamp, Stamp]

    def holds(self, module: nn.Module, name: str) -> bool:
        """Whether `module` still has this weight and nothing that it depends on was touched."""
        weight: Tensor | None = module.__dict__.get(name)
        orig = module._parameters.get(name + "_orig")
        mask = module._buffers.get(name + "_mask")
        if weight is None or orig is None or mask is None:
            return False
        return (
            self.weight() is weight
            and self.orig() is orig
            and self.grad == (orig.requires_grad and torch.is_grad_enabled())
            and unchanged(orig, self.stamps[0])
            and unchanged(mask, self.stamps[1])
            and unchanged(weight, self.stamps[2])
        )


def make(orig: Tensor, mask: Tensor) -> tuple[Tensor, Made | None]:
    """The masked weight for the current grad mode; with evidence, if all it depends on can be watched."""
    stamps = (watch(orig), watch(mask))
    if stamps[0] is None or stamps[1] is None:
        return mask.to(dtype=orig.dtype) * orig, None
    grad = orig.requires_grad and torch.is_grad_enabled()
    weight = masked(orig, mask, grad)
    stamp = watch(weight)
    if stamp is None:
        return weight, None
    return weight, Made(weakref.ref(weight), weakref.ref(orig), grad, (stamps[0], stamps[1], stamp))
