"""The algebra of axes. Pure: it knows no torch op."""

from secateur.axes.layout import (
    EMPTY,
    UNIT,
    Atom,
    Concat,
    Layout,
    Mask,
    Product,
    atoms,
    constant,
    free_atoms,
    keep_mask,
    positions,
    resolve,
    size_after,
    why_fixed,
)
from secateur.axes.polynomial import Polynomial
from secateur.axes.unify import factor, fix, hint, leak, note, pieces, split, unify

__all__ = [
    "EMPTY",
    "UNIT",
    "Atom",
    "Concat",
    "Layout",
    "Mask",
    "Polynomial",
    "Product",
    "atoms",
    "constant",
    "factor",
    "fix",
    "free_atoms",
    "hint",
    "keep_mask",
    "leak",
    "note",
    "pieces",
    "positions",
    "resolve",
    "size_after",
    "split",
    "unify",
    "why_fixed",
]
