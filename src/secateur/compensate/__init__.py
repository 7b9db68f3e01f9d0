"""Accuracy kept without training: what is left of a model takes over for what was removed."""

from secateur.compensate.compensation import Compensation, Constants, LeastSquares, Statistics
from secateur.compensate.outcome import Layer, Outcome
from secateur.compensate.pairs import twin

__all__ = ["Compensation", "Constants", "Layer", "LeastSquares", "Outcome", "Statistics", "twin"]
