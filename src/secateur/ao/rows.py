"""Row masks by saliency: the one idea behind the structured pruners; they differ in what is salient."""

import abc
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secateur.ao.config import Group, sparsity_level
from secateur.ao.errors import SparsifierAssertionError, SparsifierValueError
from secateur.ao.parametrization import mask_of, unmasked
from secateur.ao.structured import BaseStructuredSparsifier
from secateur.prune import _compute_norm


def keep_salient(saliency: Tensor, kept: Tensor, drop: int) -> Tensor:
    """
    >>> keep_salient(torch.tensor([[1.0, 4.0, 2.0]]), torch.tensor([[True, True, True]]), drop=1)
    tensor([[False,  True,  True]])

    In each line of `saliency` (not negative) False for the `drop` least salient entries. Entries that are not
    `kept` so far go first, the least salient before the others: masks grow with `drop`, and as it falls the
    most salient come back.
    """
    gone_first = saliency - 2 * saliency.amax(1, keepdim=True)
    order = torch.where(kept, saliency, gone_first)
    dropped = order.topk(drop, dim=1, largest=False, sorted=False).indices
    return torch.ones_like(kept, dtype=torch.bool).scatter_(1, dropped, False)


class RowPruner(BaseStructuredSparsifier):
    """Masks the least salient rows of each weight. A subclass says what is salient.

    The saliency is that of the weights without their mask; see `keep_salient` for what happens to rows that
    are masked already.
    """

    _levels: ClassVar[tuple[float, float]] = (0.0, 1.0)

    @abc.abstractmethod
    def _saliency(self, weight: Tensor) -> Tensor:
        """The saliency of every row, in lines that are pruned apart from each other: shape (lines, rows)."""

    def _count(self, level: float, rows: int) -> int:
        """How many of `rows` rows go at this sparsity level."""
        return int(rows * level)

    def _check(self, group: Group) -> None:
        # A level may be missing until the first step.
        if "sparsity_level" in group:
            sparsity_level(group, *self._levels)

    def _check_tensor(self, group: Group) -> None:
        super()._check_tensor(group)
        shape = tuple(getattr(group["module"], group["tensor_name"]).shape)
        if len(shape) < 2:
            raise SparsifierValueError(
                f"{group['tensor_fqn']}: has shape {shape}; only a weight with 2 or more dims has rows"
            )

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Mask the least salient rows of one weight."""
        mask = mask_of(module, tensor_name)
        level = sparsity_level({"tensor_fqn": tensor_name, **kwargs}, *self._levels)
        if not 0 < level < 1:
            mask.fill_(level <= 0)
            return
        saliency = self._saliency(unmasked(module, tensor_name))
        if saliency.numel() != mask.numel():
            raise SparsifierAssertionError(
                f"{kwargs.get('tensor_fqn', tensor_name)}: {saliency.numel()} rows and a mask for "
                f"{mask.numel()}; the model has changed since prepare(), prepare it again"
            )
        kept = mask.bool().view_as(saliency)
        mask.copy_(keep_salient(saliency, kept, self._count(level, saliency.shape[1])).flatten())


class SaliencyPruner(RowPruner):
    """
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> _ = model[0].weight.data.copy_(torch.tensor([[1.0, 1.0], [2.0, -2.0]]))
    >>> pruner = SaliencyPruner({"sparsity_level": 0.5})
    >>> pruner.prepare(model, None)
    >>> pruner.step()
    >>> model[0].parametrizations.weight[0].mask
    tensor([False,  True])

    Masks the fraction `sparsity_level` (rounded down) of each weight's rows, those with the smallest L1 norm.
    """

    def _saliency(self, weight: Tensor) -> Tensor:
        return _compute_norm(weight, n=1, dim=0)[None]
