"""The algebra of axes. Pure: it knows no torch op."""

from secateur.axes.layout import (
    EMPTY,
    UNIT,
    Atom,
    Boundary,
    Concat,
    Contradiction,
    Inherent,
    Layout,
    Mask,
    Product,
    atoms,
    constant,
    copied,
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

__all__ = ["EMPTY", "UNIT", "Atom", "Boundary", "Concat", "Contradiction", "Inherent", "Layout", "Mask", "Polynomial"]
__all__ += ["Product", "atoms", "constant", "copied", "factor", "fix", "free_atoms", "hint", "inherent", "keep_mask"]
__all__ += ["leak", "note", "owned", "pieces", "positions", "resolve", "size_after", "split", "unify", "why_fixed"]
