"""Which positions of an uncut layer's output a cut one still has, and how far the two are apart."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from secateur.planning.plans import Plan

KeptPositions = tuple[int, Tensor]  # a dimension and which of the uncut model's positions it still has


def missed(ours: Tensor, theirs: Tensor) -> Tensor:
    """How much of the variance of what should come out is missed.

    >>> wanted = torch.tensor([[1.0], [3.0]])
    >>> missed(torch.tensor([[2.0], [2.0]]), wanted), missed(wanted, wanted)
    (tensor(1.), tensor(0.))
    """
    wide = torch.promote_types(ours.dtype, torch.float32)
    a, b = ours.to(wide), theirs.to(wide)
    spread = (b - b.mean(0, keepdim=True) if len(b) > 1 else b).square().mean()
    return (a - b).square().mean() / spread.clamp_min(torch.finfo(wide).tiny)


def ways(name: str, small: torch.Size, large: torch.Size, plan: Plan | None) -> Iterator[KeptPositions | None]:
    """Ways in which the positions of a module's output may be those of the uncut one; None: it has all."""
    if small == large:
        yield None
        return
    if len(small) != len(large) or plan is None:
        return
    dims = [dim for dim, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
    if len(dims) > 1:
        return
    within = (kept for tensor, kept in plan.kept.items() if tensor.startswith(f"{name}."))
    found = {tuple(indices) for kept in within for indices in kept.values() if len(indices) == small[dims[0]]}
    yield from ((dims[0], torch.tensor(way)) for way in sorted(found) if way[-1] < large[dims[0]])


def picked(output: Tensor, positions: KeptPositions | None) -> Tensor:
    """What a cut layer should put out."""
    return output if positions is None else output.index_select(positions[0], positions[1].to(output.device))
