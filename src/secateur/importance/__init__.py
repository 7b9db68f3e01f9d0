"""How much each position of an axis matters. One criterion per file; any function of a `Context` is one."""

from secateur.importance.activation import Activation
from secateur.importance.bn_scale import BNScale
from secateur.importance.criterion import Criterion, Sum
from secateur.importance.fpgm import FPGM
from secateur.importance.gather import Context, Importance, gather
from secateur.importance.hessian import Hessian
from secateur.importance.lamp import LAMP
from secateur.importance.magnitude import Magnitude
from secateur.importance.random import Random
from secateur.importance.reconstruction import Reconstruction
from secateur.importance.scope import Global, Isomorphic, PerAxis, Scope, rank
from secateur.importance.taylor import Taylor
from secateur.importance.wanda import Wanda

__all__ = [
    "Activation",
    "BNScale",
    "Context",
    "Criterion",
    "FPGM",
    "Global",
    "Hessian",
    "Importance",
    "Isomorphic",
    "LAMP",
    "Magnitude",
    "PerAxis",
    "Random",
    "Reconstruction",
    "Scope",
    "Sum",
    "Taylor",
    "Wanda",
    "gather",
    "rank",
]
