"""The algebra of axes. Pure: it knows no torch op."""

from secateur.axes.layout import (
    EMPTY,
    UNIT,
    Atom,
    Concat,
    Inherent,
    Layout,
    Mask,
    Product,
    atoms,
    constant,
    free_atoms,
    inherent,
    keep_mask,
    owned,
    positions,
    resolve,
    size_after,
    why_fixed,
)
from secateur.axes.learn import factor, fix, hint, leak, note, pieces, split, unify
from secateur.axes.polynomial import Polynomial

__all__ = ["EMPTY", "UNIT", "Atom", "Concat", "Inherent", "Layout", "Mask", "Polynomial", "Product", "atoms"]
__all__ += ["constant", "factor", "fix", "free_atoms", "hint", "inherent", "keep_mask", "leak", "note", "owned"]
__all__ += ["pieces", "positions", "resolve", "size_after", "split", "unify", "why_fixed"]
