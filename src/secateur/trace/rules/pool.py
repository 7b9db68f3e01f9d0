"""Pooling and resizing: space changes, channels stay."""

from __future__ import annotations

from typing import Any

import torch

from secateur.axes import Product, factor, unify
from secateur.trace.registry import rule
from secateur.trace.value import Call, Value

aten = torch.ops.aten


def _spatial(call: Call, x: Value, keep: int) -> Value:
    for dim in x.dims[keep:]:
        call.fix(dim, "spatial")
    return Value([*x.dims[:keep], *(call.fixed(n, "spatial") for n in call.shape[keep:])], x.zero)


@rule(aten.avg_pool1d.default, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
@rule(aten.avg_pool2d.default, aten.avg_pool3d.default, aten.adaptive_avg_pool1d.default)
@rule(aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
def average_pool(call: Call, x: Value, *_: Any, **__: Any) -> Value:
    """Means of windows in space."""
    rank = 3 if "3d" in call.name else 2 if "2d" in call.name else 1
    return _spatial(call, x, len(x.dims) - rank)


@rule(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
@rule(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def max_pool(call: Call, x: Value, *_: Any, **__: Any) -> tuple[Value, Value]:
    """Largest of windows in space, and where they are."""
    pooled = _spatial(call, x, len(x.dims) - (3 if "3d" in call.name else 2))
    return pooled, Value(pooled.dims, False)


@rule(aten.fractional_max_pool2d.default)
def fractional_max_pool(call: Call, x: Value, kernel: Any, size: Any, samples: Value) -> tuple[Value, Value]:
    """Largest of windows at random places, which `samples` draws for each image and channel."""
    call.fix(samples.dims[2], "spatial")
    for i in range(1, len(x.dims) - 1):
        unify(x.dims[-2 - i], samples.dims[2 - i])
    return max_pool(call, x)


@rule(aten.upsample_nearest1d, aten.upsample_linear1d, aten._upsample_nearest_exact1d)
@rule(aten.upsample_nearest2d, aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten._upsample_nearest_exact2d)
@rule(aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa)
@rule(aten.upsample_nearest3d, aten.upsample_trilinear3d, aten._upsample_nearest_exact3d)
def resize(call: Call, x: Value, *_: Any, **__: Any) -> Value:
    """Space resampled."""
    return _spatial(call, x, 2)


@rule(aten.grid_sampler_2d, aten.grid_sampler_3d)
def sample(call: Call, x: Value, grid: Value, *_: Any, **__: Any) -> Value:
    """Space sampled where a grid of coordinates says."""
    call.fix(x.dims[0], "spatial")
    call.opaque(grid, reason="coordinates in space")
    return _spatial(call, x, 2)


@rule(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(call: Call, x: Value, groups: int) -> Value:
    """Channels (g × c) in the order (c × g)."""
    group, inner = factor(x.dims[1], groups)
    call.tracer.group_axis = group
    return Value([x.dims[0], Product((inner, group)), *x.dims[2:]], x.zero)


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(call: Call, x: Value, upscale: int) -> Value:
    """Channels (c × r²) become c channels in r times the space."""
    channels, inner = factor(x.dims[-3], x.dims[-3].size // upscale**2)
    call.fix(inner, "becomes space")
    for dim in x.dims[-2:]:
        call.fix(dim, "spatial")
    space = [call.fixed(n, "spatial") for n in call.shape[-2:]]
    return Value([*x.dims[:-3], channels, *space], x.zero)


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(call: Call, x: Value, downscale: int) -> Value:
    """Space becomes channels: c becomes (c × r²)."""
    for dim in x.dims[-2:]:
        call.fix(dim, "spatial")
    space = [call.fixed(n, "spatial") for n in call.shape[-2:]]
    channels = Product((x.dims[-3], call.fixed(downscale**2, "was space")))
    return Value([*x.dims[:-3], channels, *space], x.zero)
