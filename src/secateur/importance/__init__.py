"""How much each position of an axis matters. Any function of a `Context` is a criterion."""

from secateur.importance.activation import Activation, Wanda
from secateur.importance.criterion import Criterion, JointCriterion, Sum, scored, uses_data
from secateur.importance.gradients import Hessian, Taylor
from secateur.importance.reconstruction import Reconstruction
from secateur.importance.scope import Global, Isomorphic, PerAxis, Scope, rank
from secateur.importance.weights import Context, Importance, Weights, gather
from secateur.importance.without_data import FPGM, LAMP, BNScale, Magnitude, Random

__all__ = ["Activation", "BNScale", "Context", "Criterion", "FPGM", "Global", "Hessian", "Importance"]
__all__ += ["Isomorphic", "JointCriterion", "LAMP", "Magnitude", "PerAxis", "Random", "Reconstruction", "Scope"]
__all__ += ["Sum", "Taylor", "Wanda", "Weights", "gather", "rank", "scored", "uses_data"]
