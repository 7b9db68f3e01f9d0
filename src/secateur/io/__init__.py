"""Keeping what a cut made: one safetensors file with the weights and the plan. No pickle."""

from secateur.io.checkpoint import cut_checkpoint
from secateur.io.compressing import compress_checkpoint
from secateur.io.loading import load
from secateur.io.saving import save

__all__ = ["compress_checkpoint", "cut_checkpoint", "load", "save"]
