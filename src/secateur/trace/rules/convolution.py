"""Convolutions of every dimension, plain, grouped, depthwise and transposed."""

from __future__ import annotations

from typing import Any

import torch

from secateur.axes import Product, factor, hint, leak, unify
from secateur.trace.registry import rule
from secateur.trace.value import Call, Value

aten = torch.ops.aten


@rule(aten.convolution.default, aten.convolution_overrideable.default)
def convolution(
    call: Call,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Value:
    """out[n, (g, o), …] mixes x[n, (g, i), …] through weight[(g, o), i, …]; transposed: weight[(g, i), o, …]."""
    call.tracer.group_axis = None
    if groups == 1:
        inside, outside = (0, 1) if transposed else (1, 0)
        call.contract(x, 1, weight, inside)
        channels, spread = weight.dims[outside], weight.dims[outside]
        mixed = weight.dims[inside]
    else:
        group_in, mixed = factor(x.dims[1], groups)
        if not x.is_zero(1):
            leak(mixed)
        if not x.is_zero(1) and not weight.is_zero(0 if transposed else 1):
            call.note(mixed, "sums over removed positions that are not zero")
        outer, inner = (mixed, weight.dims[1]) if transposed else (weight.dims[1], mixed)
        if transposed:
            unify(weight.dims[0], Product((group_in, outer)))
            call.sums(mixed, weight, x)
            spread = inner
            channels = Product((group_in, inner))
        else:
            unify(outer, inner)
            call.reads(weight, 1, mixed, x)
            group, spread = factor(weight.dims[0], groups)
            unify(group, group_in)
            channels = Product((group_in, spread))
        call.tracer.group_axis = group_in
        if mixed.size > 1 or spread.size > 1:
            hint(group_in, "groups")
    for i in range(2, len(weight.dims)):
        call.fix(weight.dims[i], "kernel")
    if bias is not None:
        unify(channels, bias.dims[0])
    made_of = (1,) if transposed and groups == 1 else (0, 1) if transposed else (0,)
    clean = all(weight.is_zero(i) for i in made_of) and (bias is None or bias.is_zero(0))
    spatial = [call.fixed(n, "spatial") for n in call.shape[2:]]
    cost_spatial = list(x.dims[2:]) if transposed else spatial
    call.tracer.cost(call, x.dims[0], channels, mixed, *cost_spatial, *weight.dims[2:])
    for i, dim in enumerate(x.dims):
        if i > 1:
            call.fix(dim, "spatial")
    return Value([x.dims[0], channels, *spatial], [False, clean] + [True] * len(spatial))


@rule(aten.im2col.default)
def im2col(call: Call, x: Value, kernel: Any, *_: Any) -> Value:
    """out[n, (c, k), l]: the patches of each channel."""
    dims = list(x.dims)
    for dim in dims[-2:]:
        call.fix(dim, "spatial")
    channels = Product((dims[-3], call.fixed(kernel[0] * kernel[1], "kernel")))
    lead = dims[:-3]
    return Value(
        [*lead, channels, call.fixed(call.shape[-1], "spatial")],
        [*x.zero[: len(lead)], x.is_zero(len(lead)), True],
    )


@rule(aten.col2im.default)
def col2im(call: Call, x: Value, output_size: Any, kernel: Any, *_: Any) -> Value:
    """out[n, c, …]: patches added back into an image."""
    patch = kernel[0] * kernel[1]
    channels, inner = factor(x.dims[-2], x.dims[-2].size // patch)
    call.fix(inner, "kernel")
    call.fix(x.dims[-1], "spatial")
    lead = list(x.dims[:-2])
    spatial = [call.fixed(n, "spatial") for n in call.shape[-2:]]
    return Value([*lead, channels, *spatial], [*x.zero[: len(lead)], x.is_zero(len(lead)), True, True])
