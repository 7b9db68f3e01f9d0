"""What a model does with the user's data: every product with a parameter, op by op."""

from secateur.calibrate.lanes import Lane, lanes
from secateur.calibrate.live import Live
from secateur.calibrate.products import Parameters, Product
from secateur.calibrate.stakes import stakes
from secateur.calibrate.watch import Watch, calibrating, call

__all__ = ["Lane", "Live", "Parameters", "Product", "Watch", "calibrating", "call", "lanes", "stakes"]
