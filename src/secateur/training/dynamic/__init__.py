"""Ways in which masks change while a network is trained, one file each."""

from secateur.sparse.distribution import ERK, Distribution, Uniform
from secateur.training.dynamic.gradual import GMP
from secateur.training.dynamic.method import Layer, SparseMethod
from secateur.training.dynamic.movement import Movement
from secateur.training.dynamic.regrowth import SET
from secateur.training.dynamic.rewinding import Rewinding
from secateur.training.dynamic.rigl import RigL
from secateur.training.dynamic.srste import SRSTE
from secateur.training.dynamic.static import Static

__all__ = ["ERK", "GMP", "SET", "SRSTE", "Distribution", "Layer", "Movement", "Rewinding", "RigL", "SparseMethod"]
__all__ += ["Static", "Uniform"]
