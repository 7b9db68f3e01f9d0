"""Modules that a cut model may need where torch's own cannot express the result."""

from secateur.nn.attention import MultiheadAttention, multi_head_attention_forward

__all__ = ["MultiheadAttention", "multi_head_attention_forward"]
