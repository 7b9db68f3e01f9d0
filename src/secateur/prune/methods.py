"""The pruning methods: what each of them chooses."""

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
from secateur.prune.combine import Drop, in_place
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


class RandomUnstructured(BasePruningMethod):
    """Prunes entries at random, exactly as many as asked for.

    >>> layer = nn.Linear(4, 4)
    >>> _ = RandomUnstructured.apply(layer, "weight", amount=0.25)
    >>> int((layer.weight_mask == 0).sum())
    4

    The draws come from torch's generator, so `torch.manual_seed` makes them repeatable.
    """

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: Any) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` with zeros at randomly chosen entries, drawn among all entries of `t`."""
        return _anywhere(_drop_random, self, t, default_mask)

    @classmethod
    def apply(cls, module: nn.Module, name: str, amount: Any) -> BasePruningMethod:  # type: ignore[override]
        """Prune `amount` of the entries of `module.name` at random."""
        return super().apply(module, name, amount=amount)


class L1Unstructured(BasePruningMethod):
    """Prunes the entries of smallest magnitude, exactly as many as asked for.

    >>> L1Unstructured(amount=2).prune(torch.tensor([-1.0, 3.0, -2.0]))
    tensor([-0., 3., -0.])

    Of equal magnitudes at the border, the first in memory go.
    """

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: Any) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` with zeros at the entries where `t` is smallest in magnitude."""
        return _anywhere(_drop_smallest, self, t, default_mask)

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Any, importance_scores: Tensor | None = None
    ) -> BasePruningMethod:
        """Prune `amount` of the entries of `module.name`, those of smallest magnitude or score."""
        return super().apply(module, name, amount=amount, importance_scores=importance_scores)


class RandomStructured(BasePruningMethod):
    """Prunes whole channels at random.

    >>> layer = nn.Linear(4, 4)
    >>> _ = RandomStructured.apply(layer, "weight", amount=1, dim=0)
    >>> sorted(layer.weight_mask.sum(dim=1).tolist())
    [0.0, 4.0, 4.0, 4.0]
    """

    PRUNING_TYPE = "structured"

    def __init__(self, amount: Any, dim: int = -1) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` with zeros in randomly chosen slices along `dim`."""
        return _drop_channels(self, t, default_mask)

    def _rank_channels(self, t: Tensor, normalized: bool) -> Tensor:
        return torch.rand(t.shape[self.dim]).to(t.device)

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Any, dim: int = -1
    ) -> BasePruningMethod:
        """Prune `amount` of the channels of `module.name` along `dim`, at random."""
        return super().apply(module, name, amount=amount, dim=dim)


class LnStructured(BasePruningMethod):
    """Prunes the channels of smallest L_n norm.

    >>> t = torch.tensor([[1.0, 5.0], [2.0, 2.0]])
    >>> LnStructured(amount=1, n=2, dim=0).prune(t)
    tensor([[1., 5.],
            [0., 0.]])

    `n` is any order that `torch.linalg.vector_norm` takes, or 'fro', or 'nuc'.
    """

    PRUNING_TYPE = "structured"

    def __init__(self, amount: Any, n: Any, dim: int = -1) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount
        self.n = n
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` with zeros in the slices along `dim` where `t` has the smallest norm."""
        return _drop_channels(self, t, default_mask)

    def _rank_channels(self, t: Tensor, normalized: bool) -> Tensor:
        return (normalized_norm if normalized else _compute_norm)(t, self.n, self.dim)

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        module: nn.Module,
        name: str,
        amount: Any,
        n: Any,
        dim: int,
        importance_scores: Tensor | None = None,
    ) -> BasePruningMethod:
        """Prune `amount` of the channels of `module.name` along `dim`, those of smallest norm."""
        return super().apply(module, name, amount=amount, n=n, dim=dim, importance_scores=importance_scores)


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


def _drop_smallest(method: L1Unstructured, segments: Sequence[Segment]) -> None:
    drop_smallest(segments, count_to_prune(method.amount, sum(s.candidates() for s in segments)))


def _drop_random(method: RandomUnstructured, segments: Sequence[Segment]) -> None:
    count = count_to_prune(method.amount, sum(s.candidates() for s in segments))
    drop_smallest([_with_random_scores(s) for s in segments], count)


def _with_random_scores(segment: Segment) -> Segment:
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


def _anywhere(drop: Drop, method: BasePruningMethod, t: Tensor, default_mask: Tensor) -> Tensor:
    """`default_mask` with zeros where `drop` puts them among all entries of `t`, pruned before or not."""
    mask = torch.empty_like(check_scores(default_mask, t, "default_mask"))
    drop(method, [Segment(t, mask, fresh=True)])
    return mask.mul_(default_mask)


def _drop_channels(method: RandomStructured | LnStructured, t: Tensor, default_mask: Tensor) -> Tensor:
    return default_mask.to(dtype=t.dtype) * _kept_channels(method, t)


def _drop_channels_afresh(method: RandomStructured | LnStructured, segments: Sequence[Segment]) -> None:
    for segment in segments:
        segment.mask.copy_(_kept_channels(method, segment.scores))


def _kept_channels(method: RandomStructured | LnStructured, t: Tensor) -> Tensor:
    _validate_structured_pruning(t)
    _validate_pruning_dim(t, method.dim)
    count = count_to_prune(method.amount, t.shape[method.dim])
    lowest = method._rank_channels(t, normalized=False).argsort(stable=True)[:count]
    return channel_mask(t, method.dim, lowest)


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


in_place(L1Unstructured.compute_mask, _drop_smallest)
in_place(RandomUnstructured.compute_mask, _drop_random)
in_place(RandomStructured.compute_mask, _drop_channels_afresh)
in_place(LnStructured.compute_mask, _drop_channels_afresh)

for _method in (Identity, RandomUnstructured, L1Unstructured, RandomStructured, LnStructured, CustomFromMask):
    getattr(torch_prune, _method.__name__).register(_method)  # accepted wherever torch's own is checked for
