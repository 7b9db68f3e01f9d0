"""Normalisations, and weights that are kept as a direction and a length."""

from __future__ import annotations

from typing import Any

import torch

from secateur.axes import constant, factor, hint, resolve, unify
from secateur.trace.registry import rule
from secateur.trace.value import Call, Value

aten = torch.ops.aten


def _affine(call: Call, x: Value, at: int, *vectors: Value | None) -> None:
    for vector in vectors:
        if vector is not None and vector.dims:
            unify(x.dims[at], vector.dims[0])


@rule(
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
    aten.miopen_batch_norm.default,
)
def batch_norm(call: Call, x: Value, weight: Value | None, bias: Value | None, *rest: Any) -> tuple[Value, ...]:
    """out[n, c, …] = (x[n, c, …] - mean[c]) / deviation[c] * weight[c] + bias[c]."""
    stats = [v for v in rest if isinstance(v, Value)]
    training = any(v is True for v in rest)
    _affine(call, x, 1, weight, bias, *stats)
    for i in range(len(x.dims)):
        if i != 1 and (training or not stats):
            call.note(x.dims[i], "a statistic is taken over it")
    scaled = weight is not None and weight.is_zero(0)
    centred = x.is_zero(1) and (training or not stats or stats[0].is_zero(0))
    clean = (scaled or centred) and (bias is None or bias.is_zero(0))
    zero = [i == 1 and clean for i in range(len(x.dims))]
    saved = [Value([x.dims[1]] if shape else [], False) if shape != (0,) else None for shape in call.outs[1:]]
    return Value(x.dims, zero), *(
        v if v is not None and v.shape == shape else Value([call.fixed(n) for n in shape])
        for v, shape in zip(saved, call.outs[1:], strict=True)
    )


@rule(aten.native_layer_norm.default)
def layer_norm(
    call: Call, x: Value, shape: Any, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, ...]:
    """Normalised over the last dimensions, then scaled and shifted."""
    return _last_dims_norm(call, x, len(shape), weight, bias)


@rule(aten._fused_rms_norm.default, aten.rms_norm.default)
def rms_norm(call: Call, x: Value, shape: Any, weight: Value | None, eps: float | None = None) -> tuple[Value, ...]:
    """Divided by the root of the mean square over the last dimensions, then scaled."""
    return _last_dims_norm(call, x, len(shape), weight, None)


def _last_dims_norm(call: Call, x: Value, n: int, weight: Value | None, bias: Value | None) -> tuple[Value, ...]:
    first = len(x.dims) - n
    for i, dim in enumerate(x.dims[first:]):
        for vector in (weight, bias):
            if vector is not None:
                unify(dim, vector.dims[i])
        call.note(dim, "a statistic is taken over it")
    scaled = weight is not None and (bias is None or all(bias.zero))
    zero = [False] * first + [scaled and weight.is_zero(i) for i in range(n)]  # type: ignore[union-attr]
    stats = Value([*x.dims[:first], *(call.fixed(1) for _ in range(n))], False)
    return Value(x.dims, zero), *(
        Value(stats.dims, False) if stats.shape == shape else Value([call.fixed(s) for s in shape])
        for shape in call.outs[1:]
    )


@rule(aten.native_group_norm.default)
def group_norm(
    call: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: int,
    c: int,
    hw: int,
    groups: int,
    eps: float,
) -> tuple[Value, ...]:
    """Normalised over (channels of a group × space), then scaled and shifted per channel."""
    group, inner = factor(x.dims[1], groups)
    call.tracer.group_axis = group
    for layout in (inner, *x.dims[2:]):
        call.note(layout, "a statistic is taken over it")
    if not constant(resolve(inner)):
        hint(group, "groups")
    _affine(call, x, 1, weight, bias)
    zero = [False] * len(x.dims)
    scaled = weight is not None and weight.is_zero(0)
    zero[1] = (scaled or (inner.size == 1 and x.is_zero(1))) and (bias is None or bias.is_zero(0))
    stats = Value([x.dims[0], group], False)
    return Value(x.dims, zero), stats, Value(stats.dims, False)


@rule(aten._weight_norm_interface.default, aten._weight_norm.default)
def weight_norm(call: Call, v: Value, g: Value, dim: int = 0) -> Any:
    """weight = g * v / ‖v‖, the norm over every dimension but one; 0 / 0 counts as 0."""
    zero = []
    for i, layout in enumerate(v.dims):
        if g.dims[i].size == layout.size:
            unify(g.dims[i], layout)
            zero.append(g.is_zero(i) or v.is_zero(i))
        else:
            call.reduce(v, i)
            zero.append(v.is_zero(i))
    out = Value(v.dims, zero)
    return (out, Value(g.dims, v.zero)) if len(call.outs) == 2 else out
