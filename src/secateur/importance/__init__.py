"""How much each position of an axis matters. One criterion per file; any function of a `Context` is one."""

from secateur.importance.gather import Context, gather
from secateur.importance.magnitude import Magnitude

__all__ = ["Context", "Magnitude", "gather"]
