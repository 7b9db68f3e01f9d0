"""How much each position of an axis matters. One criterion per file; any function of a `Context` is one."""

from secateur.importance.bn_scale import BNScale
from secateur.importance.fpgm import FPGM
from secateur.importance.gather import Context, Importance, gather
from secateur.importance.magnitude import Magnitude
from secateur.importance.random import Random

__all__ = ["BNScale", "Context", "FPGM", "Importance", "Magnitude", "Random", "gather"]
