"""Scaled dot-product attention, seen as a whole: which kernel computes it does not matter."""

from __future__ import annotations

from typing import Any

import torch

from secateur.axes import UNIT, Atom, Product, hint, resolve, unify
from secateur.trace.registry import function_rule
from secateur.trace.value import Call, Value


@function_rule(torch.nn.functional.scaled_dot_product_attention)
def attention(
    call: Call,
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """out[…, h, l, d] = Σ_s softmax_s(Σ_e q[…, h, l, e] k[…, h, s, e] * scale + mask) v[…, h, s, d]."""
    call.contract(q, -1, k, -1)
    hint(q.dims[-1], "head dims")
    hint(v.dims[-1], "head dims")
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
        hint(lead[-1], "heads")
    if isinstance(attn_mask, Value):
        _align([*lead, q.dims[-2], k.dims[-2]], attn_mask.dims)
    call.tracer.cost(call, *lead, q.dims[-2], q.dims[-1], k.dims[-2])
    call.tracer.cost(call, *lead, q.dims[-2], k.dims[-2], v.dims[-1])
    same = len(v.dims) == len(call.shape)
    zero = [same and v.dims[i].size == n and v.is_zero(i) for i, n in enumerate(call.shape[:-2])]
    return Value([*(resolve(d) for d in lead), q.dims[-2], v.dims[-1]], [*zero, False, v.is_zero(-1)])


def _align(full: Any, dims: Any) -> None:
    """Unify aligned to the right, where a size of one broadcasts."""
    for a, b in zip(reversed(full), reversed(dims), strict=False):
        if a.size == b.size:
            unify(a, b)
