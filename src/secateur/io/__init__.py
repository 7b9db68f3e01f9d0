"""Keeping what a cut made: one safetensors file with the weights and the plan. No pickle."""

from secateur.io.load import load
from secateur.io.save import save

__all__ = ["load", "save"]
