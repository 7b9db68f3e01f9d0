"""What each op does to axes: one file per family, imported for its registrations."""

from secateur.trace.rules import (
    attention,
    convolution,
    create,
    index,
    matmul,
    norm,
    pointwise,
    pool,
    recurrent,
    reduce,
    view,
)

__all__ = [
    "attention",
    "convolution",
    "create",
    "index",
    "matmul",
    "norm",
    "pointwise",
    "pool",
    "recurrent",
    "reduce",
    "view",
]
