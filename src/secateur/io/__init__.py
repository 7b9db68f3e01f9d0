"""Keeping what a cut made: one safetensors file with the weights and the plan. No pickle."""

from secateur.io.checkpoint import cut_checkpoint
from secateur.io.loading import load
from secateur.io.saving import save

__all__ = ["cut_checkpoint", "load", "save"]
