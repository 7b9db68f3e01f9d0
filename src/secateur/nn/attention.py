"""Multi-head attention whose heads need not add up to the width of the model."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FORWARD = nn.MultiheadAttention.forward

Scale = Callable[[Any], float | None]


def _attending(scale: Scale) -> Callable[..., Any]:
    """What `nn.MultiheadAttention.forward` does, with every width read from the weights and a scale for the scores."""

    def forward(
        self: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As the original's."""
        swap = self.batch_first and query.dim() == 3
        if swap:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        out, weights = multi_head_attention_forward(
            *(query, key, value, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias),
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            self.out_proj.weight,
            self.out_proj.bias,
            self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=self.in_proj_weight is None,
            q_proj_weight=self.q_proj_weight,
            k_proj_weight=self.k_proj_weight,
            v_proj_weight=self.v_proj_weight,
            average_attn_weights=average_attn_weights,
            scale=scale(self),
        )
        return (out.transpose(0, 1) if swap else out), weights

    return forward


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with any number of heads of any width.

    >>> attention = nn.MultiheadAttention(8, 2)
    >>> attention.__class__ = MultiheadAttention
    >>> attention.scale = 0.5
    >>> attention(*torch.zeros(3, 5, 1, 8))[0].shape
    torch.Size([5, 1, 8])

    Torch's module insists that heads × head width is its `embed_dim`, which no longer holds once a head is gone.
    This one reads the widths from its weights, and keeps the `scale` that the scores had before.
    """

    scale: float
    forward = _attending(lambda module: module.scale)


def forward(scale: Scale) -> Callable[..., Any]:
    """What `nn.MultiheadAttention.forward` does, as it will be done after a cut; modules derived from it do as ever."""
    attending = _attending(scale)

    def run(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        return (attending if type(self) is nn.MultiheadAttention else _FORWARD)(self, *args, **kwargs)

    return run


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`torch.nn.functional.multi_head_attention_forward`, with every width read from the weights."""
    batched = query.dim() == 3
    if not batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights = _projections(
        in_proj_weight, out_proj_weight, use_separate_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight
    )
    biases = _split(in_proj_bias, weights)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    if bias_k is not None and bias_v is not None:
        k, v = (torch.cat([x, b.expand(1, x.shape[1], -1)]) for x, b in ((k, bias_k), (v, bias_v)))
    q, k, v = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    k = k if static_k is None else static_k.unflatten(0, (-1, num_heads))
    v = v if static_v is None else static_v.unflatten(0, (-1, num_heads))
    if add_zero_attn:
        k, v = (torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2) for x in (k, v))
    mask = _mask(attn_mask, key_padding_mask, num_heads, q, k.shape[2] - key.shape[0])
    if scale is None:
        scale = 1.0 / math.sqrt(int.__index__(q.shape[-1]))
    attention = None
    if need_weights:
        scores = (q * scale) @ k.transpose(-2, -1)
        attention = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout_p, training)
        mixed = attention @ v
        attention = attention.mean(dim=1) if average_attn_weights else attention
        attention = attention if batched else attention.squeeze(0)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p if training else 0.0, scale=scale)
    out = F.linear(mixed.permute(2, 0, 1, 3).flatten(-2), out_proj_weight, out_proj_bias)
    return (out if batched else out.squeeze(1)), attention


def _projections(
    packed: Tensor | None,
    out: Tensor,
    separate: bool,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if separate:
        assert q is not None
        assert k is not None
        assert v is not None
        return q, k, v
    assert packed is not None
    value_rows = out.shape[1]
    query_rows = (packed.shape[0] - value_rows) // 2
    wq, wk, wv = packed.split([query_rows, query_rows, value_rows])
    return wq, wk, wv


def _split(bias: Tensor | None, weights: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    return (None, None, None) if bias is None else bias.split([weight.shape[0] for weight in weights])


def _mask(attn_mask: Tensor | None, padding: Tensor | None, heads: int, q: Tensor, extra: int) -> Tensor | None:
    """One additive mask that broadcasts over (batch, heads, queries, keys)."""
    total = None
    if attn_mask is not None:
        total = _additive(attn_mask, q)
        total = total.unflatten(0, (-1, heads)) if total.dim() == 3 else total
        total = F.pad(total, (0, extra))
    if padding is not None:
        hidden = F.pad(_additive(padding, q), (0, extra))[:, None, None, :]
        total = hidden if total is None else total + hidden
    return total


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
