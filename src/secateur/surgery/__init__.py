"""Cutting: new tensors in place of old ones, attributes, optimizer state."""

from secateur.surgery.cut import carry_out, check_fit

__all__ = ["carry_out", "check_fit"]
