"""Training with pruning: recover what a cut lost, learn what to cut, train with zeros from the start.

>>> from secateur import training
>>> training.GroupLasso()
GroupLasso()
"""

from secateur.training.during import Cuts, Floor, Learned, Masks
from secateur.training.dynamic import (
    ERK,
    GMP,
    SET,
    SRSTE,
    Movement,
    Rewinding,
    RigL,
    SparseMethod,
    Static,
    Uniform,
)
from secateur.training.outcome import Recovered, Trained
from secateur.training.penalties import GReg, GroupLasso, HalfSpace, Polarization
from secateur.training.penalty import Penalty
from secateur.training.pruning import Pruning
from secateur.training.recovery import recover
from secateur.training.sparse_training import SparseTraining

__all__ = ["Recovered", "Trained", "recover"]
__all__ += ["Penalty", "GReg", "GroupLasso", "HalfSpace", "Polarization"]
__all__ += ["SparseTraining", "SparseMethod", "GMP", "Movement", "Rewinding", "RigL", "SET", "SRSTE", "Static"]
__all__ += ["ERK", "Uniform"]
__all__ += ["Pruning", "Cuts", "Floor", "Learned", "Masks"]
