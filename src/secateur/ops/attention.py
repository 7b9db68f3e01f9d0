"""Scaled dot-product attention, seen as a whole: which kernel computes it does not matter."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from secateur.axes import UNIT, Atom, Layout, Product, hint, resolve, unify
from secateur.ops.absent import NAN
from secateur.ops.record import function
from secateur.ops.value import Call, Value


@function(torch.nn.functional.scaled_dot_product_attention)
def attention(
    call: Call,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """out[…, h, l, d] = Σ_s softmax_s(Σ_e q[…, h, l, e] k[…, h, s, e] * scale + mask) v[…, h, s, d]."""
    q, k, v = query, key, value
    call.contract((q, -1), (k, -1))
    hint(q.dims[-1], "head dims")
    hint(v.dims[-1], "value head dims")
    if scale is None:
        call.note(q.dims[-1], "scores are divided by the root of its size")
    unify(k.dims[-2], v.dims[-2])
    call.note(k.dims[-2], "takes a statistic over it")
    if is_causal:
        call.fix(q.dims[-2], "causal order")
        call.fix(k.dims[-2], "causal order")
    lead = [UNIT if n == 1 else Atom(n) for n in call.shape[:-2]]
    for x in (k, v):
        if enable_gqa and len(x.dims) > 2 and x.dims[-3].size < call.shape[-3]:
            repeats = Atom(call.shape[-3] // x.dims[-3].size)
            unify(lead[-1], Product((x.dims[-3], repeats)))
            _align(lead[:-1], x.dims[:-3])
        else:
            _align(lead, x.dims[:-2])
    _align(lead, q.dims[:-2])
    if lead:
        hint(lead[-1], "heads", "kv heads", "query heads per kv head")
    if isinstance(attn_mask, Value):
        _align([*lead, q.dims[-2], k.dims[-2]], attn_mask.dims)
    same = len(v.dims) == len(call.shape)
    zero = [same and v.dims[i].size == n and v.is_zero(i) for i, n in enumerate(call.shape[:-2])]
    return Value([*(resolve(d) for d in lead), q.dims[-2], v.dims[-1]], [*zero, False, v.is_zero(-1)])


@attention.cost
def _(out: Value, query: Value, key: Value, value: Value, *_: Any, **__: Any) -> Iterator[tuple[Layout, ...]]:
    """Queries times keys, then scores times values."""
    yield (*out.dims[:-1], query.dims[-1], key.dims[-2])
    yield (*out.dims, key.dims[-2])


@attention.absent
def _(
    op: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Spelled out, in ops that skip what is absent."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        keep = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
        scores = scores + attn_mask
    return torch.softmax(scores, -1).nan_to_num_(nan=NAN) @ value


def _align(full: Any, dims: Any) -> None:
    """Unify aligned to the right, where a size of one broadcasts."""
    for a, b in zip(reversed(full), reversed(dims), strict=False):
        if a.size == b.size:
            unify(a, b)
