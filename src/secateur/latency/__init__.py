"""Budgets in time: measuring models, predicting what a cut model takes, and `Latency` as a target."""

from secateur.latency.target import Confirmation, Latency
from secateur.latency.timing import Comparison, Timing, compare, latency

__all__ = ["Comparison", "Latency", "Confirmation", "Timing", "compare", "latency"]
