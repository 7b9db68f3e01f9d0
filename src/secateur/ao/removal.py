"""Removing the rows that a structured pruner has masked."""

from typing import TYPE_CHECKING

from torch import nn

from secateur.errors import SparsifierNotImplementedError

if TYPE_CHECKING:
    from secateur.ao.structured import BaseStructuredSparsifier


def remove(pruner: "BaseStructuredSparsifier") -> nn.Module:
    """Remove the masked rows from the pruner's model; returns the smaller model."""
    raise SparsifierNotImplementedError(
        f"{type(pruner).__name__}.prune: removing rows is not available yet; "
        "squash_mask() makes the masks final at full size"
    )
