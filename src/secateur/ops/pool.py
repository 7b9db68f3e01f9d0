"""Pooling and resizing: space changes, channels stay."""

from typing import Any

import torch
from torch import Tensor

from secateur.axes import Product, factor, unify
from secateur.compat import aten
from secateur.ops.absent import absent_lines, mark
from secateur.ops.record import op
from secateur.ops.value import SPACE, Call, Value, layouts_of
from secateur.sizes.explain import Explainer
from secateur.sizes.size import plain


def _spatial(call: Call, x: Value, keep: int) -> Value:
    for dim in x.dims[keep:]:
        call.fix(dim, SPACE)
    return Value([*x.dims[:keep], *(call.fixed(n, SPACE) for n in call.shape[keep:])], x.zero)


# How many dimensions of space each op pools over.
_AVERAGES = {
    aten.avg_pool1d.default: 1,
    aten.avg_pool2d.default: 2,
    aten.avg_pool3d.default: 3,
    aten.adaptive_avg_pool1d.default: 1,
    aten.adaptive_avg_pool2d.default: 2,
    aten._adaptive_avg_pool2d.default: 2,
    aten.adaptive_avg_pool3d.default: 3,
    aten._adaptive_avg_pool3d.default: 3,
}
_MAXIMA = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}


@op(
    *_AVERAGES,
    called=[f"{kind}avg_pool{n}d" for kind in ("", "adaptive_", "_adaptive_") for n in "123"],
)
def average_pool(call: Call, x: Value, *_: Any, **__: Any) -> Value:
    """Means of windows in space."""
    return _spatial(call, x, len(x.dims) - _AVERAGES[call.op])


@op(
    *_MAXIMA,
    called=[
        f"{kind}max_pool{n}d{end}" for kind in ("", "adaptive_") for n in (1, 2, 3) for end in ("", "_with_indices")
    ],
)
def max_pool(call: Call, x: Value, *_: Any, **__: Any) -> tuple[Value, Value]:
    """Largest of windows in space, and where they are."""
    pooled = _spatial(call, x, len(x.dims) - _MAXIMA.get(call.op, 2))
    return pooled, Value(pooled.dims, False)


@op(aten.fractional_max_pool2d.default)
def fractional_max_pool(call: Call, x: Value, kernel: Any, size: Any, samples: Value) -> tuple[Value, Value]:
    """Largest of windows at random places, which `samples` draws for each image and channel."""
    call.fix(samples.dims[2], SPACE)
    for i in range(1, len(x.dims) - 1):
        unify(x.dims[-2 - i], samples.dims[2 - i])
    return max_pool(call, x)


@op(aten.max_unpool2d.default, aten.max_unpool3d.default, called="max_unpool2d max_unpool3d")
def max_unpool(call: Call, x: Value, places: Value, *_: Any) -> Value:
    """Each element put back where `places` says that the largest of its window was, zeros around it."""
    for a, b in zip(x.dims, places.dims, strict=True):
        unify(a, b)
    return _spatial(call, x, len(x.dims) - (2 if call.op is aten.max_unpool2d.default else 3))


@max_unpool.absent
def _(op: Any, x: Tensor, places: Tensor, size: Any, *rest: Any) -> Tensor:
    out = op(x, places, size, *rest)
    return mark(out, absent_lines(x, list(range(x.ndim - len(size), x.ndim))))


_RESIZES = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)


@op(*(getattr(aten, name) for name in _RESIZES), called=_RESIZES)
def resize(call: Call, x: Value, *_: Any, **__: Any) -> Value:
    """Space resampled."""
    return _spatial(call, x, 2)


@op(aten.grid_sampler_2d, aten.grid_sampler_3d, called="grid_sampler")
def sample(call: Call, x: Value, grid: Value, *_: Any, **__: Any) -> Value:
    """Space sampled where a grid of coordinates says."""
    call.fix(x.dims[0], SPACE)
    call.opaque(grid, reason="coordinates in space")
    return _spatial(call, x, 2)


@sample.absent
def _(op: Any, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    return mark(op(x, *rest, **kwargs), absent_lines(x, list(range(2, x.ndim))))


@op(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(call: Call, x: Value, groups: int) -> Value:
    """Channels (g × c) in the order (c × g)."""
    group, inner = factor(x.dims[1], groups)
    return Value([x.dims[0], Product((inner, group)), *x.dims[2:]], x.zero)


@channel_shuffle.sizes("channel_shuffle", torch.nn.functional.channel_shuffle, "native_channel_shuffle")
def _(explain: Explainer, out: Any, input: Any, groups: Any) -> None:
    if layouts_of(input):
        explain.expect(groups, factor(layouts_of(input)[1], plain(groups))[0])


@op(aten.pixel_shuffle.default, called="pixel_shuffle")
def pixel_shuffle(call: Call, x: Value, upscale: int) -> Value:
    """Channels (c × r²) become c channels in r times the space."""
    channels, inner = factor(x.dims[-3], x.dims[-3].size // upscale**2)
    call.fix(inner, "becomes space")
    for dim in x.dims[-2:]:
        call.fix(dim, SPACE)
    space = [call.fixed(n, SPACE) for n in call.shape[-2:]]
    return Value([*x.dims[:-3], channels, *space], x.zero)


@op(aten.pixel_unshuffle.default, called="pixel_unshuffle")
def pixel_unshuffle(call: Call, x: Value, downscale: int) -> Value:
    """Space becomes channels: c becomes (c × r²)."""
    for dim in x.dims[-2:]:
        call.fix(dim, SPACE)
    space = [call.fixed(n, SPACE) for n in call.shape[-2:]]
    channels = Product((x.dims[-3], call.fixed(downscale**2, "was space")))
    return Value([*x.dims[:-3], channels, *space], x.zero)
