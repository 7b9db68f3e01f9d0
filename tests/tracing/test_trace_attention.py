"""Attention in every common spelling: heads and head dims are axes of their own, whoever computes the scores."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Linear

from oracle import Net, axes_at, axis_at, proved, reason, sizes_at, tied, weight

X = torch.randn(2, 5, 6)
SCALE = 0.5


def heads(n, x, count=None):
    return x.unflatten(-1, (n.h if count is None else count, -1)).transpose(1, 2)


def sdpa(q, k, v, **kwargs):
    return F.scaled_dot_product_attention(q, k, v, scale=SCALE, **kwargs)


def softmax(q, k, v):
    return (q @ k.mT * SCALE).softmax(-1) @ v


def einsum(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * SCALE
    return torch.einsum("bhqk,bhkd->bhqd", F.softmax(scores, dim=-1), v)


def baddbmm(q, k, v):
    b, h, s, d = q.shape
    zero = torch.zeros(b * h, s, s, dtype=q.dtype)
    scores = torch.baddbmm(zero, q.reshape(b * h, s, d), k.reshape(b * h, s, d).mT, beta=0, alpha=SCALE)
    return torch.bmm(scores.softmax(-1), v.reshape(b * h, s, -1)).view(b, h, s, -1)


KERNELS = pytest.mark.parametrize("kernel", [sdpa, softmax, einsum, baddbmm], ids=lambda f: f.__name__)


@KERNELS
def test_separate_projections(kernel):
    def run(n, x):
        return n.o(kernel(heads(n, n.q(x)), heads(n, n.k(x)), heads(n, n.v(x))).transpose(1, 2).flatten(2))

    graph = proved(Net(run, q=Linear(6, 12), k=Linear(6, 12), v=Linear(6, 15), o=Linear(15, 4), h=3), X)
    (head, scored) = axes_at(graph, "q.weight")
    assert (head.size, scored.size) == (3, 4)
    assert axes_at(graph, "k.weight") == [head, scored]
    (same, valued) = axes_at(graph, "v.weight")
    assert same is head
    assert valued.size == 5
    assert axes_at(graph, "o.weight", 1) == [head, valued]
    assert all(axis.exact for axis in graph.axes)


def by_reshape(n, x):
    b, s, _ = x.shape
    return n.qkv(x).reshape(b, s, 3, n.h, n.d).permute(2, 0, 3, 1, 4).unbind(0)


def by_split(n, x):
    return [heads(n, part) for part in n.qkv(x).split(n.h * n.d, -1)]


def by_chunk(n, x):
    return [heads(n, part) for part in n.qkv(x).chunk(3, dim=-1)]


def per_head(n, x):
    return heads(n, n.qkv(x)).chunk(3, -1)


@KERNELS
@pytest.mark.parametrize("fused", [by_reshape, by_split, by_chunk, per_head], ids=lambda f: f.__name__)
def test_fused_projections(fused, kernel):
    def run(n, x):
        return n.o(kernel(*fused(n, x)).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))

    graph = proved(Net(run, qkv=Linear(6, 36), o=Linear(12, 4), h=3, d=4), X)
    found = sizes_at(graph, "qkv.weight")
    assert 3 in found
    assert 4 in found
    assert axes_at(graph, "o.weight", 1)[0] in axes_at(graph, "qkv.weight")
    assert {axis.exact for axis in graph.axes} == {True}


def test_head_dims_that_scale_the_scores_are_inexact():
    def run(n, x):
        q, k, v = (heads(n, part(x)) for part in (n.q, n.k, n.v))
        return n.o((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1).matmul(v).transpose(1, 2).flatten(2))

    net = Net(run, q=Linear(6, 12), k=Linear(6, 12), v=Linear(6, 12), o=Linear(12, 4), h=3)
    head, scored = axes_at(proved(net, X), "q.weight")
    assert head.exact
    assert "used as a number" in scored.why
    assert "test_trace_attention.py:" in scored.why

    def default(n, x):
        q, k, v = (heads(n, part(x)) for part in (n.q, n.k, n.v))
        return n.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    head, scored = axes_at(
        proved(Net(default, q=Linear(6, 12), k=Linear(6, 12), v=Linear(6, 12), o=Linear(12, 4), h=3), X),
        "q.weight",
    )
    assert head.exact
    assert "root of its size" in scored.why


def test_a_scale_held_as_a_number_leaves_head_dims_exact():
    def run(n, x):
        q, k, v = (heads(n, part(x)) for part in (n.q, n.k, n.v))
        return n.o((q @ k.mT * n.scale).softmax(-1).matmul(v).transpose(1, 2).flatten(2))

    net = Net(run, q=Linear(6, 12), k=Linear(6, 12), v=Linear(6, 12), o=Linear(12, 4), h=3, scale=4**-0.5)
    assert all(axis.exact for axis in proved(net, X).axes)


def repeat_by_interleave(n, k):
    return k.repeat_interleave(n.r, dim=1)


def repeat_by_expand(n, k):
    b, g, s, d = k.shape
    return k[:, :, None].expand(b, g, n.r, s, d).reshape(b, g * n.r, s, d)


def repeat_from_counts(n, k):
    return k.repeat_interleave(n.h // n.g, 1)


@pytest.mark.parametrize(
    "repeat", [repeat_by_interleave, repeat_by_expand, repeat_from_counts], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("groups", [2, 1], ids=["grouped-query", "multi-query"])
def test_fewer_keys_than_queries(repeat, groups):
    def run(n, x):
        q, k, v = heads(n, n.q(x)), heads(n, n.k(x), n.g), heads(n, n.v(x), n.g)
        return n.o(softmax(q, repeat(n, k), repeat(n, v)).transpose(1, 2).flatten(2))

    net = Net(
        run,
        q=Linear(6, 24),
        k=Linear(6, 4 * groups),
        v=Linear(6, 4 * groups),
        o=Linear(24, 4),
        h=6,
        g=groups,
        r=6 // groups,
    )
    graph = proved(net, X)
    assert sizes_at(graph, "q.weight") == ([2, 3, 4] if groups == 2 else [6, 4])
    assert sizes_at(graph, "k.weight") == ([2, 4] if groups == 2 else [4])


@pytest.mark.parametrize("groups", [2, 1])
def test_grouped_queries_by_the_kernel(groups):
    def run(n, x):
        q, k, v = heads(n, n.q(x)), heads(n, n.k(x), n.g), heads(n, n.v(x), n.g)
        return n.o(sdpa(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))

    net = Net(run, q=Linear(6, 24), k=Linear(6, 4 * groups), v=Linear(6, 4 * groups), o=Linear(24, 4), h=6, g=groups)
    graph = proved(net, X)
    assert sizes_at(graph, "q.weight")[-1] == 4
    assert sizes_at(graph, "k.weight")[-1] == 4


def test_grouped_queries_by_a_five_dimensional_einsum():
    def run(n, x):
        b, s, _ = x.shape
        q = n.q(x).view(b, s, n.g, n.r, n.d)
        k, v = n.k(x).view(b, s, n.g, n.d), n.v(x).view(b, s, n.g, n.d)
        weights = torch.einsum("bqgrd,bkgd->bgrqk", q, k).softmax(-1)
        return n.o(torch.einsum("bgrqk,bkgd->bqgrd", weights, v).reshape(b, s, n.g * n.r * n.d))

    graph = proved(Net(run, q=Linear(6, 24), k=Linear(6, 8), v=Linear(6, 8), o=Linear(24, 4), g=2, r=3, d=4), X)
    assert sizes_at(graph, "q.weight") == [2, 3, 4]
    assert sizes_at(graph, "k.weight") == [2, 4]


def rotate_halves(n, x, angles):
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotate_halves_by_slices(n, x, angles):
    cos, sin = angles.cos(), angles.sin()
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rotate_pairs(n, x, angles):
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def rotate_pairs_by_repeat(n, x, angles):
    cos, sin = angles.cos().repeat_interleave(2, -1), angles.sin().repeat_interleave(2, -1)
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    return x * cos + turned * sin


def rotate_complex(n, x, angles):
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@pytest.mark.parametrize(
    "rotate", [rotate_halves, rotate_halves_by_slices, rotate_pairs, rotate_pairs_by_repeat, rotate_complex],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_rotary_embeddings_tie_pairs_to_their_frequency(rotate):
    def run(n, x):
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * n.inv_freq
        q, k = rotate(n, heads(n, n.q(x)), angles), rotate(n, heads(n, n.k(x)), angles)
        return n.o(softmax(q, k, heads(n, n.v(x))).transpose(1, 2).flatten(2))

    net = Net(
        run,
        {"inv_freq": torch.ones(4)},
        q=Linear(6, 16),
        k=Linear(6, 16),
        v=Linear(6, 16),
        o=Linear(16, 4),
        h=2,
    )
    graph = proved(net, X)
    pairs = axis_at(graph, "inv_freq")
    assert pairs.size == 4
    assert pairs.exact
    assert axes_at(graph, "q.weight") == axes_at(graph, "k.weight")
    assert pairs in axes_at(graph, "q.weight")
    assert 2 in sizes_at(graph, "q.weight")


def test_a_norm_per_head():
    def run(n, x):
        q, k, v = (heads(n, part(x)) for part in (n.q, n.k, n.v))
        return n.o(softmax(n.qn(q), n.kn(k), v).transpose(1, 2).flatten(2))

    net = Net(
        run,
        q=Linear(6, 12),
        k=Linear(6, 12),
        v=Linear(6, 12),
        o=Linear(12, 4),
        qn=nn.LayerNorm(4),
        kn=nn.RMSNorm(4),
        h=3,
    )
    graph = proved(net, X)
    head, scored = axes_at(graph, "q.weight")
    assert head.exact
    assert not scored.exact
    assert tied(graph, ("qn.weight", 0), ("qn.bias", 0), ("kn.weight", 0))
    assert axes_at(graph, "v.weight")[1].exact


def test_a_relative_position_table_follows_the_heads():
    def run(n, x):
        q, k, v = (heads(n, part(x)) for part in (n.q, n.k, n.v))
        bias = n.table[n.index.view(-1)].view(5, 5, -1).permute(2, 0, 1)
        return n.o((q @ k.mT + bias).softmax(-1).matmul(v).transpose(1, 2).flatten(2))

    index = torch.arange(5)[:, None] - torch.arange(5) + 4
    net = Net(
        run,
        {"index": index},
        q=Linear(6, 12),
        k=Linear(6, 12),
        v=Linear(6, 12),
        o=Linear(12, 4),
        table=weight(9, 3),
        h=3,
    )
    graph = proved(net, X)
    assert axis_at(graph, "table", 1) is axes_at(graph, "q.weight")[0]
    assert "chosen by an index" in reason(graph, "table", 0)


def test_relative_positions_by_an_embedding():
    def run(n, x):
        q, k, v = (heads(n, part(x)) for part in (n.q, n.k, n.v))
        apart = (torch.arange(5)[:, None] - torch.arange(5)).clamp(-2, 2) + 2
        return n.o((q @ k.mT + n.bias(apart).permute(2, 0, 1)[None]).softmax(-1).matmul(v).transpose(1, 2).flatten(2))

    net = Net(run, q=Linear(6, 12), k=Linear(6, 12), v=Linear(6, 12), o=Linear(12, 4), bias=nn.Embedding(5, 3), h=3)
    graph = proved(net, X)
    assert axis_at(graph, "bias.weight", 1) is axes_at(graph, "q.weight")[0]


def test_slopes_in_a_buffer_follow_and_slopes_counted_in_forward_block_the_heads():
    def run(n, x):
        q, k, v = (heads(n, part(x)) for part in (n.q, n.k, n.v))
        slopes = n.slopes if hasattr(n, "slopes") else 2.0 ** -torch.arange(1, n.h + 1, dtype=x.dtype)
        bias = slopes[:, None, None] * torch.arange(5, dtype=x.dtype)
        return n.o((q @ k.mT + bias).softmax(-1).matmul(v).transpose(1, 2).flatten(2))

    parts = {"q": Linear(6, 12), "k": Linear(6, 12), "v": Linear(6, 12), "o": Linear(12, 4), "h": 3}
    graph = proved(Net(run, {"slopes": torch.ones(3)}, **parts), X)
    assert axis_at(graph, "slopes") is axes_at(graph, "q.weight")[0]
    graph = proved(Net(run, **parts), X)
    assert sizes_at(graph, "q.weight") == [4]


@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 5, 5), (2, 3, 5, 5)], ids=["2d", "broadcast", "per head"])
def test_masks_given_to_the_kernel(shape):
    def run(n, x, mask):
        q, k, v = (heads(n, part(x)) for part in (n.q, n.k, n.v))
        return n.o(sdpa(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))

    net = Net(run, q=Linear(6, 12), k=Linear(6, 12), v=Linear(6, 12), o=Linear(12, 4), h=3)
    graph = proved(net, (X, torch.randn(shape)))
    assert sizes_at(graph, "q.weight") == ([4] if shape == (2, 3, 5, 5) else [3, 4])


def test_a_causal_kernel():
    def run(n, x):
        q, k, v = (heads(n, part(x)) for part in (n.q, n.k, n.v))
        return n.o(sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    graph = proved(Net(run, q=Linear(6, 12), k=Linear(6, 12), v=Linear(6, 12), o=Linear(12, 4), h=3), X)
    assert sizes_at(graph, "q.weight") == [3, 4]


def test_heads_from_a_width_that_is_cut_too():
    """head_dim = width // heads ties counts, not positions: what cannot be met is not cut."""

    def run(n, x):
        x = n.embed(x)
        b, s, c = x.shape
        q, k, v = n.qkv(x).reshape(b, s, 3, n.h, c // n.h).permute(2, 0, 3, 1, 4)
        return n.o(softmax(q, k, v).transpose(1, 2).reshape(b, s, c))

    graph = proved(Net(run, embed=Linear(6, 12), qkv=Linear(12, 36), o=Linear(12, 4), h=3), X, ratios=(0.5, 0.34, 0.67))
    assert graph.constraints or not any(axis.exact for axis in graph.axes)
