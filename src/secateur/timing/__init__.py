"""Budgets in time: measuring models, predicting what a cut model takes, and `Latency` as a target."""

from secateur.timing.measure import Comparison, Timing, compare, latency
from secateur.timing.target import Confirmation, Latency

__all__ = ["Comparison", "Latency", "Confirmation", "Timing", "compare", "latency"]
