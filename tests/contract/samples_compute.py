"""Samples of products, convolutions, normalisations, pooling and whole functions."""

from __future__ import annotations

from typing import Any

import torch
from sampling import Draw, Sample, call, groups_of, in_size, sample
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from secateur.compat import aten


@sample(aten.mm.default)
def mm(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    return call(draw.x(a, b), draw.x(b, c))


@sample(aten.addmm.default)
def addmm(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    bias = draw.rng.choice([(c,), (a, c), (1, c), (a, 1), (1,)])
    return call(draw.x(*bias), draw.x(a, b), draw.x(b, c), alpha=2.0, beta=0.5)


@sample(aten.addmm.default)
def addmm_of_its_shape(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    return call(draw.x(a, c), draw.x(a, b), draw.x(b, c))


@sample(aten.bmm.default)
def bmm(draw: Draw) -> Sample:
    n, a, b, c = draw.sizes(4)
    return call(draw.x(n, a, b), draw.x(n, b, c))


@sample(aten._sparse_addmm.default)
def sparse_addmm(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)

    def run(added: Tensor, one: Tensor, other: Tensor, **kwargs: Any) -> Tensor:
        added = added.expand(one.shape[0], other.shape[1]).clone()
        return aten._sparse_addmm.default(added, one.to_sparse(), other, **kwargs)

    return Sample((draw.x(a, c), draw.x(a, b), draw.x(b, c)), {}, True, run)


@sample(aten.baddbmm.default)
def baddbmm(draw: Draw) -> Sample:
    n, a, b, c = draw.sizes(4)
    bias = draw.rng.choice([(n, a, c), (a, c), (1, 1, c), (n, a, 1)])
    return call(draw.x(*bias), draw.x(n, a, b), draw.x(n, b, c))


@sample(aten.addbmm.default)
def addbmm(draw: Draw) -> Sample:
    n, a, b, c = draw.sizes(4)
    return call(draw.x(*draw.rng.choice([(a, c), (c,)])), draw.x(n, a, b), draw.x(n, b, c))


@sample(aten.mv.default)
def mv(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(b))


@sample(aten.addmv.default)
def addmv(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a), draw.x(a, b), draw.x(b))


@sample(aten.addr.default)
def addr(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(a), draw.x(b))


@sample(aten.dot.default, aten.vdot.default)
def dot(draw: Draw) -> Sample:
    a = draw.n()
    return call(draw.x(a), draw.x(a))


@sample(aten._grouped_mm.default)
def grouped_mm(draw: Draw) -> Sample:
    """Tokens sorted by expert: `ends` says where each expert's end. Strides must be multiples of 16 bytes."""
    a, b, c = 6, 16, 16
    ends = torch.tensor([2, 3, 6], dtype=torch.int32)

    def run(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        starts = [0, *ends.tolist()[:-1]]
        return torch.cat([x[i:j] @ w[e] for e, (i, j) in enumerate(zip(starts, ends.tolist(), strict=True))])

    return Sample((draw.x(a, b), draw.x(3, b, c), ends), run=run)


@sample(aten._grouped_mm.default)
def grouped_mm_of_equal_groups(draw: Draw) -> Sample:
    n, a, b, c = draw.sizes(4)
    return Sample((draw.x(n, a, b), draw.x(n, b, c)), run=torch.bmm)


@sample(aten._trilinear.default)
def trilinear(draw: Draw) -> Sample:
    """As F.bilinear calls it: out[b, o] = Σ_ij x[b, i] w[o, i, j] y[b, j]."""
    b, o, i, j = draw.sizes(4)
    return call(draw.x(b, i), draw.x(o, i, j), draw.x(b, j), [1, 3], [0], [1, 2], [2, 3])


@sample(aten.convolution.default)
def convolution(draw: Draw) -> Sample:
    rank = draw.n(1, 3)
    n, i, o = draw.sizes(3)
    transposed = draw.rng.random() < 0.5
    channels = (i, o) if transposed else (o, i)
    return _convolution(draw, (n, i, *[4] * rank), (*channels, *[2] * rank), o, transposed, 1)


@sample(aten.convolution.default)
def depthwise(draw: Draw) -> Sample:
    g, o = draw.n(2, 4), draw.n(1, 3)
    return _convolution(draw, (2, g, 4, 4), (g * o, 1, 2, 2), g * o, False, groups_of(g))


@sample(aten.convolution.default)
def grouped(draw: Draw) -> Sample:
    g, i, o = draw.n(2, 3), draw.n(2, 3), draw.n(1, 3)
    transposed = draw.rng.random() < 0.5
    weight = (g * i, o, 2, 2) if transposed else (g * o, i, 2, 2)
    return _convolution(draw, (2, g * i, 4, 4), weight, g * o, transposed, groups_of(g))


def _convolution(draw: Draw, x: tuple, weight: tuple, bias: int, transposed: bool, groups: object) -> Sample:
    rank = len(x) - 2
    shift = draw.x(bias) if draw.rng.random() < 0.5 else None
    zeros, ones = [0] * rank, [1] * rank
    return call(draw.x(*x), draw.x(*weight), shift, ones, ones, ones, transposed, zeros, groups)


@sample(aten.convolution_overrideable.default)
def convolution_overrideable(draw: Draw) -> Sample:
    return Sample(grouped(draw).args, run=aten.convolution.default)


@sample(aten.im2col.default)
def im2col(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2), 4, 3), [2, 2], [1, 1], [0, 0], [1, 1])


@sample(aten.im2col.default)
def im2col_unbatched(draw: Draw) -> Sample:
    return call(draw.x(draw.n(), 4, 3), [2, 2], [1, 1], [0, 0], [1, 1])


@sample(aten.col2im.default)
def col2im(draw: Draw) -> Sample:
    n, c = draw.sizes(2)
    return call(draw.x(n, c * 4, 6), [4, 3], [2, 2], [1, 1], [0, 0], [1, 1])


@sample(aten.col2im.default)
def col2im_unbatched(draw: Draw) -> Sample:
    return call(draw.x(draw.n() * 4, 6), [4, 3], [2, 2], [1, 1], [0, 0], [1, 1])


# Normalisations -------------------------------------------------------------------------------------------


def _norm_inputs(draw: Draw, c: int, space: int = 2) -> tuple:
    weight, bias = draw.rng.choice([(draw.x(c), draw.x(c)), (draw.x(c), None), (None, None), (None, draw.x(c))])
    return draw.x(draw.n(), c, *[3] * space), weight, bias


@sample(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def batch_norm(draw: Draw) -> Sample:
    c = draw.n()
    training = draw.rng.random() < 0.5
    return call(*_norm_inputs(draw, c), draw.x(c), draw.positive(c), training, 0.1, 1e-5)


@sample(aten.native_batch_norm.default)
def batch_norm_of_itself(draw: Draw) -> Sample:
    return call(*_norm_inputs(draw, draw.n()), None, None, True, 0.1, 1e-5)


@sample(aten._native_batch_norm_legit_no_training.default)
def batch_norm_frozen(draw: Draw) -> Sample:
    c = draw.n()
    return call(*_norm_inputs(draw, c), draw.x(c), draw.positive(c), 0.1, 1e-5)


@sample(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(draw: Draw) -> Sample:
    return call(*_norm_inputs(draw, draw.n()), True, 0.1, 1e-5)


@sample(aten.cudnn_batch_norm.default)
def batch_norm_cudnn(draw: Draw) -> Sample:
    def run(*args: object) -> tuple:
        return (*aten.native_batch_norm.default(*args), torch.empty(0, dtype=torch.uint8))

    return Sample(batch_norm(draw).args, run=run)


@sample(aten.miopen_batch_norm.default)
def batch_norm_miopen(draw: Draw) -> Sample:
    return Sample(batch_norm(draw).args, run=aten.native_batch_norm.default)


@sample(aten.native_layer_norm.default)
def layer_norm(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    weight, bias = draw.rng.choice([(draw.x(b, c), draw.x(b, c)), (draw.x(b, c), None), (None, None)])
    return call(draw.x(a, b, c), [in_size(b, 0, 1), in_size(c, 0, 2)], weight, bias, 1e-5)


@sample(aten._fused_rms_norm.default)
def fused_rms_norm(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    weight = draw.rng.choice([draw.x(b), None])
    return call(draw.x(a, b), [in_size(b, 0, 1)], weight, 1e-5)


@sample(aten.rms_norm.default)
def rms_norm(draw: Draw) -> Sample:
    return fused_rms_norm(draw)


@sample(aten.native_group_norm.default)
def group_norm(draw: Draw) -> Sample:
    n, g, c = draw.sizes(3)
    weight, bias = draw.rng.choice([(draw.x(g * c), draw.x(g * c)), (draw.x(g * c), None), (None, None)])
    x = draw.x(n, g * c, 3)
    return call(x, weight, bias, in_size(n, 0, 0), in_size(g * c, 0, 1), in_size(3, 0, 2), groups_of(g), 1e-5)


@sample(aten.native_group_norm.default)
def instance_norm(draw: Draw) -> Sample:
    n, c = draw.sizes(2)
    return call(draw.x(n, c, 3), None, None, in_size(n, 0, 0), in_size(c, 0, 1), in_size(3, 0, 2), groups_of(c), 1e-5)


@sample(aten._weight_norm.default)
def weight_norm(draw: Draw) -> Sample:
    both = weight_norm_interface(draw)
    return Sample(both.args, run=lambda *args: both.run(*args)[0])


@sample(aten._weight_norm_interface.default)
def weight_norm_interface(draw: Draw) -> Sample:
    """With 0 / 0 as 0: where a row of v and its length are gone, so is what they make."""
    a, b, c = draw.sizes(3)
    first = draw.rng.random() < 0.5

    def run(v: torch.Tensor, g: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = torch.linalg.vector_norm(v, dim=[i for i in range(v.ndim) if i != dim], keepdim=True)
        return torch.where(length == 0, 0.0, v * g / length), length

    args = draw.x(a, b, c), draw.x(a, 1, 1) if first else draw.x(1, 1, c), 0 if first else 2
    return Sample(args, run=run)


# Pooling and resizing -------------------------------------------------------------------------------------


@sample(aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default)
def pool_1d(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2), 4), [2])


@sample(
    aten.avg_pool2d.default,
    aten.adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.max_pool2d_with_indices.default,
    aten.adaptive_max_pool2d.default,
)
def pool_2d(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(draw.n(1, 2)), 4, 4), [2, 2])


@sample(
    aten.avg_pool3d.default,
    aten.adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d.default,
    aten.max_pool3d_with_indices.default,
    aten.adaptive_max_pool3d.default,
)
def pool_3d(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(draw.n(1, 2)), 4, 4, 4), [2, 2, 2])


@sample(aten.fractional_max_pool2d.default)
def fractional_pool(draw: Draw) -> Sample:
    n, c = draw.sizes(2)
    samples = torch.rand(n, c, 2, dtype=torch.float64, generator=draw.torch_rng)
    return call(draw.x(n, c, 5, 5), [2, 2], [3, 3], samples)


@sample(aten.max_unpool2d.default)
def unpool(draw: Draw) -> Sample:
    n, c = draw.sizes(2)
    places = torch.stack([torch.randperm(16, generator=draw.torch_rng)[:4].reshape(2, 2) for _ in range(n * c)])
    return call(draw.x(n, c, 2, 2), places.reshape(n, c, 2, 2), [4, 4])


@sample(aten.max_unpool3d.default)
def unpool_3d(draw: Draw) -> Sample:
    n, c = draw.sizes(2)
    places = torch.stack([torch.randperm(64, generator=draw.torch_rng)[:8].reshape(2, 2, 2) for _ in range(n * c)])
    return call(draw.x(n, c, 2, 2, 2), places.reshape(n, c, 2, 2, 2), [4, 4, 4], [2, 2, 2], [0, 0, 0])


_RESIZE = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d"),
    2: ("upsample_nearest2d", "_upsample_nearest_exact2d"),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d"),
}
_RESIZE_CORNERS = {
    1: ("upsample_linear1d",),
    2: ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    3: ("upsample_trilinear3d",),
}


def _resizers(rank: int) -> None:
    @sample(*(getattr(aten, name).default for name in _RESIZE[rank]))
    def to_size(draw: Draw) -> Sample:
        return call(draw.x(*draw.sizes(2), *[3] * rank), [5] * rank)

    @sample(*(getattr(aten, name).vec for name in _RESIZE[rank]))
    def by_factor(draw: Draw) -> Sample:
        return call(draw.x(*draw.sizes(2), *[3] * rank), None, [2.0] * rank)

    @sample(*(getattr(aten, name).default for name in _RESIZE_CORNERS[rank]))
    def corners_to_size(draw: Draw) -> Sample:
        return call(draw.x(*draw.sizes(2), *[3] * rank), [5] * rank, False)

    @sample(*(getattr(aten, name).vec for name in _RESIZE_CORNERS[rank]))
    def corners_by_factor(draw: Draw) -> Sample:
        return call(draw.x(*draw.sizes(2), *[3] * rank), None, False, [2.0] * rank)


for _rank in (1, 2, 3):
    _resizers(_rank)


@sample(aten.grid_sampler_2d.default)
def grid_2d(draw: Draw) -> Sample:
    n = draw.n()
    return call(draw.x(n, draw.n(), 3, 3), draw.x(n, 4, 2, 2), 0, 0, False)


@sample(aten.grid_sampler_3d.default)
def grid_3d(draw: Draw) -> Sample:
    n = draw.n()
    return call(draw.x(n, draw.n(), 3, 3, 3), draw.x(n, 4, 2, 2, 3), 0, 0, False)


@sample(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(draw: Draw) -> Sample:
    g = draw.n()
    return call(draw.x(2, g * draw.n(), 3, 3), groups_of(g))


@sample(aten.pixel_shuffle.default)
def pixel_shuffle(draw: Draw) -> Sample:
    return call(draw.x(draw.n(), draw.n() * 4, 3, 2), 2)


@sample(aten.pixel_unshuffle.default)
def pixel_unshuffle(draw: Draw) -> Sample:
    return call(draw.x(draw.n(), draw.n(), 4, 6), 2)


# Whole functions ------------------------------------------------------------------------------------------


@sample(scaled_dot_product_attention)
def attention(draw: Draw) -> Sample:
    n, h, l, s, e, d = draw.sizes(6)
    mask = draw.rng.choice([None, draw.x(l, s), draw.x(n, h, l, s), draw.x(1, h, 1, s), draw.bools(n, 1, l, s)])
    scale = draw.rng.choice([None, 0.7])
    return call(draw.x(n, h, l, e), draw.x(n, h, s, e), draw.x(n, h, s, d), mask, scale=scale)


@sample(scaled_dot_product_attention)
def attention_causal(draw: Draw) -> Sample:
    n, l, s, e, d = draw.sizes(5)
    return call(draw.x(n, l, e), draw.x(n, s, e), draw.x(n, s, d), is_causal=True, scale=0.5)


@sample(scaled_dot_product_attention)
def attention_grouped_query(draw: Draw) -> Sample:
    n, g, r, l, s, e, d = draw.sizes(7)
    return call(draw.x(n, g * r, l, e), draw.x(n, g, s, e), draw.x(n, g, s, d), enable_gqa=True, scale=0.5)


@sample(scaled_dot_product_attention)
def attention_broadcast(draw: Draw) -> Sample:
    n, h, l, s, e, d = draw.sizes(6)
    return call(draw.x(n, h, l, e), draw.x(1, h, s, e), draw.x(n, 1, s, d), scale=0.5)


def _recurrent(draw: Draw, gates: int, *, packed: bool) -> tuple:
    layers, both, biased = draw.n(1, 2), draw.rng.random() < 0.5, draw.rng.random() < 0.5
    batch_first = draw.rng.random() < 0.5 and not packed
    steps, batch, features, hidden = draw.sizes(4)
    projection = hidden - 1 if gates == 4 and hidden > 2 and draw.rng.random() < 0.5 else 0
    out = projection or hidden
    weights = []
    for layer in range(layers):
        wide = features if layer == 0 else out * (1 + both)
        for _ in range(1 + both):
            weights += [draw.x(gates * hidden, wide), draw.x(gates * hidden, out)]
            weights += [draw.x(gates * hidden), draw.x(gates * hidden)] if biased else []
            weights += [draw.x(out, hidden)] if projection else []
    rows = layers * (1 + both)
    fresh = draw.rng.random() < 0.5
    states = [torch.zeros(rows, batch, n, dtype=torch.float64) if fresh else draw.x(rows, batch, n)
              for n in ([out, hidden] if gates == 4 else [out])]  # fmt: skip
    state = states if gates == 4 else states[0]
    options = (biased, layers, 0.0, False, both)
    if packed:
        sizes = torch.tensor([batch] * steps)
        return draw.x(steps * batch, features), sizes, state, weights, *options
    x = draw.x(batch, steps, features) if batch_first else draw.x(steps, batch, features)
    return x, state, weights, *options, batch_first


@sample(torch.lstm)
def lstm(draw: Draw) -> Sample:
    return call(*_recurrent(draw, 4, packed=False))


@sample(torch.lstm)
def lstm_packed(draw: Draw) -> Sample:
    return call(*_recurrent(draw, 4, packed=True))


@sample(torch.gru)
def gru(draw: Draw) -> Sample:
    return call(*_recurrent(draw, 3, packed=False))


@sample(torch.gru)
def gru_packed(draw: Draw) -> Sample:
    return call(*_recurrent(draw, 3, packed=True))


@sample(torch.rnn_tanh, torch.rnn_relu)
def rnn(draw: Draw) -> Sample:
    return call(*_recurrent(draw, 1, packed=False))


@sample(torch.rnn_tanh, torch.rnn_relu)
def rnn_packed(draw: Draw) -> Sample:
    return call(*_recurrent(draw, 1, packed=True))


@sample(aten._pack_padded_sequence.default)
def pack(draw: Draw) -> Sample:
    batch_first = draw.rng.random() < 0.5
    shape = (3, 4) if batch_first else (4, 3)
    return call(draw.x(*shape, draw.n()), torch.tensor([4, 2, 1]), batch_first)


@sample(aten._pad_packed_sequence.default)
def pad_packed(draw: Draw) -> Sample:
    return call(draw.x(7, draw.n()), torch.tensor([3, 2, 1, 1]), draw.rng.random() < 0.5, 0.0, 4)
