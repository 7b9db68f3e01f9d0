"""Cutting: new tensors in place of old ones, attributes, optimizer state. All or nothing."""

from secateur.surgery.cut import Cut, check_fit, named_tensors

__all__ = ["Cut", "check_fit", "named_tensors"]
