"""What a model does with the user's data: every product with a parameter, op by op."""

from secateur.calibrate.data import Data
from secateur.calibrate.fisher import fisher_weights
from secateur.calibrate.observe import Watch, calibrating, call
from secateur.calibrate.products import ParameterProduct, Parameters
from secateur.calibrate.resume import Step
from secateur.calibrate.stages import Runs

__all__ = ["Data", "ParameterProduct", "Parameters", "Runs", "Step", "Watch", "calibrating", "call", "fisher_weights"]
