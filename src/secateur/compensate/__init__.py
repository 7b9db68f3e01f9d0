"""Accuracy kept without training: the remaining weights of a model are refitted to what it did before the cut."""

from secateur.compensate.compensation import carry_out
from secateur.compensate.pairs import twin
from secateur.compensate.recipes import Compensation, Constants, LayerFit, LeastSquares, Outcome, Statistics

__all__ = ["Compensation", "Constants", "LayerFit", "LeastSquares", "Outcome", "Statistics", "carry_out", "twin"]
