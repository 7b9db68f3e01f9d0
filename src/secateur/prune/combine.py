"""How a pruning method meets the mask that is already there."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from secateur.prune.checks import _validate_pruning_dim
from secateur.prune.errors import PruneAttributeError, PruneValueError
from secateur.prune.selection import Segment


def drop_of(method: Any) -> Callable[[Sequence[Segment]], None] | None:
    """How `method` writes the masks of segments in place, if it can.

    Unstructured methods take several segments as one, fresh or not; structured ones only fresh ones, singly. A
    subclass that overrides `compute_mask` no longer does what `_drop` does, and goes the general way.
    """
    kind = type(method)
    return method._drop if getattr(kind, "_same_as_drop", None) is kind.compute_mask else None


def combine(method: Any, t: Tensor, mask: Tensor) -> Tensor:
    """`mask` with what `method` prunes of what it has left, in the dtype of `t`.

    >>> import torch
    >>> from secateur import prune
    >>> combine(prune.L1Unstructured(1), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 1]))
    tensor([0., 0., 1.])

    An unstructured method sees the entries whose mask is 1, a structured one the channels that are not wholly
    masked, and one of type 'global' sees everything.
    """
    new = mask.to(dtype=t.dtype, copy=True)
    kind = _pruning_type(method)
    drop = drop_of(method)
    if kind == "unstructured" and drop is not None:
        drop([Segment(t, new, fresh=False)])
        return new
    seen = _seen(method, kind, t, mask)
    if seen is None:
        return method.compute_mask(t, default_mask=mask).to(dtype=t.dtype)
    new[seen] = method.compute_mask(t[seen], default_mask=mask[seen]).to(dtype=new.dtype)
    return new


def _pruning_type(method: Any) -> str:
    kind = getattr(method, "PRUNING_TYPE", None)
    if kind is None:
        raise PruneAttributeError(
            f"{type(method).__name__} has no PRUNING_TYPE; set it to 'unstructured', 'structured' or 'global'"
        )
    if kind not in ("unstructured", "structured", "global"):
        raise PruneValueError(
            f"{type(method).__name__}.PRUNING_TYPE is {kind!r}; set it to 'unstructured', 'structured' or 'global'"
        )
    return str(kind)


def _seen(method: Any, kind: str, t: Tensor, mask: Tensor) -> Any:
    """The index of what the method is shown; None for everything."""
    if kind == "global":
        return None
    if kind == "unstructured":
        return mask == 1
    if not hasattr(method, "dim"):
        raise PruneAttributeError(
            f"{type(method).__name__} prunes channels but has no attribute `dim`; set it to their dimension"
        )
    _validate_pruning_dim(t, method.dim)
    alive = alive_channels(mask, method.dim)
    return None if bool(alive.all()) else (slice(None),) * (method.dim % t.dim()) + (alive,)


def alive_channels(mask: Tensor, dim: int) -> Tensor:
    """Which slices of `mask` along `dim` are not wholly zero."""
    slices = (mask != 0).movedim(dim, 0)
    return slices.flatten(1).any(dim=1) if slices.dim() > 1 else slices
