"""The pruning methods: what each of them chooses, and the function that prunes one parameter of one module by it."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from secateur.prune.base import BasePruningMethod
from secateur.prune.checks import (
    _validate_pruning_amount_init,
    _validate_pruning_dim,
    _validate_structured_pruning,
    check_scores,
    count_to_prune,
)
from secateur.prune.norms import _compute_norm, normalized_norm
from secateur.prune.selection import Segment, drop_smallest


class Identity(BasePruningMethod):
    """Prunes nothing: a mask of ones, to be changed later.

    >>> layer = nn.Linear(2, 1)
    >>> _ = Identity.apply(layer, "weight")
    >>> layer.weight_mask
    tensor([[1., 1.]])
    """

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` itself."""
        return default_mask

    @classmethod
    def apply(cls, module: nn.Module, name: str) -> BasePruningMethod:  # type: ignore[override]
        """Reparameterise `module.name` without pruning anything."""
        return super().apply(module, name)


def identity(module: nn.Module, name: str) -> nn.Module:
    """Reparameterise a parameter without pruning anything.

    >>> identity(nn.Linear(2, 3), "bias").bias_mask
    tensor([1., 1., 1.])

    Like every function here it works in place and returns the module: the parameter `name` becomes
    `name_orig`, a buffer `name_mask` of its shape and dtype joins it, and `name` is their product.
    """
    Identity.apply(module, name)
    return module


class _Unstructured(BasePruningMethod):
    """Prunes the entries that have the lowest score, exactly as many as asked for."""

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: Any) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` with zeros at entries that are chosen among all of `t`, pruned before or not."""
        mask = torch.empty_like(check_scores(default_mask, t, "default_mask"))
        self._drop([Segment(t, mask, fresh=True)])
        return mask.mul_(default_mask)

    _same_as_drop = compute_mask

    def _drop(self, segments: Sequence[Segment]) -> None:
        count = count_to_prune(self.amount, sum(s.candidates() for s in segments))
        drop_smallest([self._scored(s) for s in segments], count)

    def _scored(self, segment: Segment) -> Segment:
        return segment


class RandomUnstructured(_Unstructured):
    """Prunes entries at random, exactly as many as asked for.

    >>> layer = nn.Linear(4, 4)
    >>> _ = RandomUnstructured.apply(layer, "weight", amount=0.25)
    >>> int((layer.weight_mask == 0).sum())
    4

    The draws come from torch's generator, so `torch.manual_seed` makes them repeatable.
    """

    def _scored(self, segment: Segment) -> Segment:
        """Scores of 1 - uniform, exact in floating point: the largest draws are the ones to go, as in torch."""
        mask = segment.mask
        wide = mask.dtype in (torch.float32, torch.float64)
        if segment.fresh and wide:  # the mask is about to be overwritten: draw into it
            torch.sub(1, mask.uniform_(), out=mask)
            return Segment(mask, mask, fresh=True)
        scores = torch.ones(mask.shape, dtype=mask.dtype if wide else torch.float32, device=mask.device)
        drawn = torch.rand(segment.candidates(), dtype=scores.dtype, device=mask.device)
        scores[torch.ones_like(mask, dtype=torch.bool) if segment.fresh else mask == 1] = 1 - drawn
        return Segment(scores, mask, segment.fresh)

    @classmethod
    def apply(cls, module: nn.Module, name: str, amount: Any) -> BasePruningMethod:  # type: ignore[override]
        """Prune `amount` of the entries of `module.name` at random."""
        return super().apply(module, name, amount=amount)


def random_unstructured(module: nn.Module, name: str, amount: Any) -> nn.Module:
    """Prune entries at random.

    >>> layer = random_unstructured(nn.Linear(2, 3), "weight", amount=1)
    >>> int((layer.weight_mask == 0).sum())
    1

    `amount` is a fraction (float) or a count (int) of the entries that are not pruned yet.
    """
    RandomUnstructured.apply(module, name, amount)
    return module


class L1Unstructured(_Unstructured):
    """Prunes the entries of smallest magnitude, exactly as many as asked for.

    >>> L1Unstructured(amount=2).prune(torch.tensor([-1.0, 3.0, -2.0]))
    tensor([-0., 3., -0.])

    Of equal magnitudes at the border, the first in memory go.
    """

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Any, importance_scores: Tensor | None = None
    ) -> BasePruningMethod:
        """Prune `amount` of the entries of `module.name`, those of smallest magnitude or score."""
        return super().apply(module, name, amount=amount, importance_scores=importance_scores)


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


class _Structured(BasePruningMethod):
    """Prunes the channels along `dim` that have the lowest rank."""

    PRUNING_TYPE = "structured"

    def __init__(self, amount: Any, dim: int = -1) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` with zeros in the slices of `t` along `dim` that are chosen."""
        return default_mask.to(dtype=t.dtype) * self._kept(t)

    _same_as_drop = compute_mask

    def _drop(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            segment.mask.copy_(self._kept(segment.scores))

    def _kept(self, t: Tensor) -> Tensor:
        _validate_structured_pruning(t)
        _validate_pruning_dim(t, self.dim)
        count = count_to_prune(self.amount, t.shape[self.dim])
        lowest = self._rank_channels(t, normalized=False).argsort(stable=True)[:count]
        return channel_mask(t, self.dim, lowest)

    @abstractmethod
    def _rank_channels(self, t: Tensor, normalized: bool) -> Tensor:
        """A number for each channel; with `normalized`, one that compares across layers."""


class RandomStructured(_Structured):
    """Prunes whole channels at random.

    >>> layer = nn.Linear(4, 4)
    >>> _ = RandomStructured.apply(layer, "weight", amount=1, dim=0)
    >>> sorted(layer.weight_mask.sum(dim=1).tolist())
    [0.0, 4.0, 4.0, 4.0]
    """

    def _rank_channels(self, t: Tensor, normalized: bool) -> Tensor:
        return torch.rand(t.shape[self.dim]).to(t.device)

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Any, dim: int = -1
    ) -> BasePruningMethod:
        """Prune `amount` of the channels of `module.name` along `dim`, at random."""
        return super().apply(module, name, amount=amount, dim=dim)


def random_structured(module: nn.Module, name: str, amount: Any, dim: int) -> nn.Module:
    """Prune whole channels along `dim` at random.

    >>> layer = random_structured(nn.Linear(5, 3), "weight", amount=3, dim=1)
    >>> int((layer.weight_mask.sum(dim=0) == 0).sum())
    3

    `amount` is a fraction (float) or a count (int) of the channels that are not wholly pruned yet.
    """
    RandomStructured.apply(module, name, amount, dim)
    return module


class LnStructured(_Structured):
    """Prunes the channels of smallest L_n norm.

    >>> t = torch.tensor([[1.0, 5.0], [2.0, 2.0]])
    >>> LnStructured(amount=1, n=2, dim=0).prune(t)
    tensor([[1., 5.],
            [0., 0.]])

    `n` is any order that `torch.linalg.vector_norm` takes, or 'fro', or 'nuc'.
    """

    def __init__(self, amount: Any, n: Any, dim: int = -1) -> None:
        super().__init__(amount, dim)
        self.n = n

    def _rank_channels(self, t: Tensor, normalized: bool) -> Tensor:
        return (normalized_norm if normalized else _compute_norm)(t, self.n, self.dim)

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Any, n: Any, dim: int, importance_scores: Tensor | None = None
    ) -> BasePruningMethod:
        """Prune `amount` of the channels of `module.name` along `dim`, those of smallest norm."""
        return super().apply(module, name, amount=amount, n=n, dim=dim, importance_scores=importance_scores)


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


class CustomFromMask(BasePruningMethod):
    """Prunes what a given mask says.

    >>> CustomFromMask(torch.tensor([0, 1])).prune(torch.tensor([3.0, 4.0]))
    tensor([0., 4.])
    """

    PRUNING_TYPE = "global"

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` times the given mask."""
        mask = check_scores(self.mask, default_mask, "mask")
        return default_mask * mask.to(dtype=default_mask.dtype, device=default_mask.device)

    @classmethod
    def apply(cls, module: nn.Module, name: str, mask: Tensor) -> BasePruningMethod:  # type: ignore[override]
        """Prune `module.name` by `mask`."""
        return super().apply(module, name, mask=mask)


def custom_from_mask(module: nn.Module, name: str, mask: Tensor) -> nn.Module:
    """Prune by a given mask.

    >>> custom_from_mask(nn.Linear(5, 3), "bias", torch.tensor([0, 1, 0])).bias_mask
    tensor([0., 1., 0.])
    """
    CustomFromMask.apply(module, name, mask)
    return module


def channel_mask(t: Tensor, dim: int, dropped: Tensor) -> Tensor:
    """A mask that broadcasts to `t`: 0 for the `dropped` indices along `dim`, 1 for the others.

    >>> channel_mask(torch.ones(2, 3), 1, torch.tensor([0]))
    tensor([[0., 1., 1.]])
    """
    mask = torch.ones(t.shape[dim], dtype=t.dtype, device=t.device)
    mask[dropped] = 0
    shape = [1] * t.dim()
    shape[dim] = -1
    return mask.view(shape)


for _method in (Identity, RandomUnstructured, L1Unstructured, RandomStructured, LnStructured, CustomFromMask):
    getattr(torch_prune, _method.__name__).register(_method)  # accepted wherever torch's own is checked for
