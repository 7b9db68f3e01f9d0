"""Blocks of sequence networks, (batch, 5, features) in and out, written the ways that people write them.

Each is `block(features, knob) -> (module, features out)`; the knob picks a variant.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.image_blocks import ACTIVATIONS, Block, divisor, pick
from oracle import Net, weight

WIDTHS = (8, 4, 12, 6)


def linear(d: int, knob: int) -> tuple[nn.Module, int]:
    out = pick(WIDTHS, knob)
    if knob % 3 == 2:
        return Net(lambda n, x: x @ n.w + n.b, w=weight(d, out), b=weight(out)), out
    return nn.Linear(d, out, bias=knob % 2 == 0), out


def norm(d: int, knob: int) -> tuple[nn.Module, int]:
    def rms(n: Net, x: Tensor) -> Tensor:
        return n.w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    def by_hand(n: Net, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, unbiased=False) + 1e-3) * n.w

    norms = (
        nn.LayerNorm(d),
        nn.RMSNorm(d),
        nn.LayerNorm(d, elementwise_affine=False),
        Net(rms, w=weight(d)),
        Net(by_hand, w=weight(d)),
        Net(lambda n, x: F.layer_norm(x, (n.d,), n.w), d=d, w=weight(d)),
        Net(lambda n, x: n.norm(x.transpose(1, 2)).transpose(1, 2), norm=nn.BatchNorm1d(d)),
    )
    return pick(norms, knob), d


def activation(d: int, knob: int) -> tuple[nn.Module, int]:
    kinds = [make for make in ACTIVATIONS if not isinstance(make(d), nn.PReLU | nn.Softmax)]
    return pick((*[make(d) for make in kinds], nn.Softmax(-1)), knob), d


def feed_forward(d: int, knob: int) -> tuple[nn.Module, int]:
    inner = pick(WIDTHS, knob)

    def swiglu(n: Net, x: Tensor) -> Tensor:
        return n.down(F.silu(n.up(x)) * n.gate(x))

    def fused(n: Net, x: Tensor) -> Tensor:
        gate, up = n.both(x).chunk(2, -1)
        return n.down(F.gelu(gate) * up)

    parts: dict[str, Any] = {"down": nn.Linear(inner, d), "both": nn.Linear(d, 2 * inner)}
    if knob % 2:
        return Net(swiglu, up=nn.Linear(d, inner), gate=nn.Linear(d, inner), down=parts["down"]), d
    return Net(fused, **parts), d


def attention(d: int, knob: int) -> tuple[nn.Module, int]:
    heads = divisor(d, knob)
    parts: dict[str, Any] = {"heads": heads, "head_dim": d // heads, "proj": nn.Linear(d, d)}
    fused, apart = {"qkv": nn.Linear(d, 3 * d)}, {k: nn.Linear(d, d, bias=k != "k") for k in "qkv"}

    def by_reshape(n: Net, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = n.qkv(x).reshape(b, t, 3, n.heads, n.head_dim).permute(2, 0, 3, 1, 4)
        return n.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))

    def by_division(n: Net, x: Tensor) -> Tensor:
        b, t, c = x.shape
        qkv = n.qkv(x).reshape(b, t, 3, n.heads, c // n.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        scores = (q @ k.transpose(-2, -1)) * (c // n.heads) ** -0.5
        return n.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))

    def by_chunk(n: Net, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, n.heads, n.head_dim).transpose(1, 2) for y in n.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(2, 3) / math.sqrt(n.head_dim)
        return n.proj((F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(b, t, n.heads * n.head_dim))

    def separate(n: Net, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (n.heads, -1)).transpose(1, 2) for f in (n.q, n.k, n.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        return n.proj(out.transpose(1, 2).flatten(2))

    def by_einsum(n: Net, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:2], n.heads, n.head_dim) for f in (n.q, n.k, n.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.2
        return n.proj(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(-2))

    forms = ((by_reshape, fused), (by_division, fused), (by_chunk, fused), (separate, apart), (by_einsum, apart))
    run, layers = pick(forms, knob // 2)
    return Net(run, **layers, **parts), d


def grouped_query(d: int, knob: int) -> tuple[nn.Module, int]:
    kv, repeats, head_dim = 2, 1 + knob % 3, 4
    parts: dict[str, Any] = {
        "q": nn.Linear(d, kv * repeats * head_dim),
        "k": nn.Linear(d, kv * head_dim),
        "v": nn.Linear(d, kv * head_dim),
        "proj": nn.Linear(kv * repeats * head_dim, d),
        "repeats": repeats,
        "head_dim": head_dim,
    }

    def rotated(x: Tensor, angles: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * angles.cos() + turned * angles.sin()

    def run(n: Net, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, n.head_dim).transpose(1, 2) for f in (n.q, n.k, n.v))
        if knob % 2:
            angles = torch.outer(torch.arange(t, dtype=x.dtype), n.inv_freq).repeat(1, 2)
            q, k = rotated(q, angles), rotated(k, angles)
        k, v = (y.repeat_interleave(n.repeats, 1) for y in (k, v))
        return n.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))

    return Net(run, buffers={"inv_freq": torch.rand(head_dim // 2)}, **parts), d


def torch_attention(d: int, knob: int) -> tuple[nn.Module, int]:
    heads = divisor(d, knob)
    attention = nn.MultiheadAttention(d, heads, batch_first=knob % 2 == 0, bias=knob % 3 != 0)
    if knob % 4 == 3:
        return nn.TransformerEncoderLayer(d, heads, 8, batch_first=True, norm_first=knob % 8 == 3), d
    if knob % 2:
        run = lambda n, x: n.attn(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1)  # noqa: E731
        return Net(run, attn=attention), d
    return Net(lambda n, x: n.attn(x, x, x)[0], attn=attention), d


def recurrent(d: int, knob: int) -> tuple[nn.Module, int]:
    kind = (nn.LSTM, nn.GRU, nn.RNN)[knob % 3]
    both, layers, hidden = knob % 2 == 1, 1 + knob // 2 % 2, pick((4, 5, 6), knob)
    rnn = kind(d, hidden, layers, batch_first=True, bidirectional=both, bias=knob % 5 != 4)
    return Net(lambda n, x: n.rnn(x)[0], rnn=rnn), hidden * (1 + both)


def over_time(d: int, knob: int) -> tuple[nn.Module, int]:
    out = pick(WIDTHS, knob)
    runs = (
        lambda n, x: n.conv(x.transpose(1, 2)).transpose(1, 2),
        lambda n, x: x + n.mix(x.transpose(-1, -2)).transpose(-1, -2),
        lambda n, x: x.cumsum(1) * 0.5,
        lambda n, x: x + n.place,
        lambda n, x: torch.roll(x, 1, 1).flip(1),
    )
    parts: dict[str, Any] = [
        {"conv": nn.Conv1d(d, out, 3, padding=1)}, {"mix": nn.Linear(5, 5)}, {}, {"place": weight(1, 5, d)}, {},
    ][knob % 5]  # fmt: skip
    return Net(pick(runs, knob), **parts), out if knob % 5 == 0 else d


def halves(d: int, knob: int) -> tuple[nn.Module, int]:
    if d % 2:
        return nn.Identity(), d
    half = d // 2
    runs = (
        lambda n, x: torch.cat([n.a(x[..., : n.half]), x[..., n.half :]], -1),
        lambda n, x: torch.cat([x[..., ::2], n.a(x[..., 1::2])], -1),
        lambda n, x: torch.cat(list(x.tensor_split(2, -1))[::-1], -1),
        lambda n, x: x.reshape(*x.shape[:-1], 2, n.half).transpose(-1, -2).flatten(-2),
        lambda n, x: x.unflatten(-1, (2, n.half)).sum(-2).repeat(1, 1, 2),
        lambda n, x: x.view(*x.shape[:2], n.half, 2).flip(-2).reshape(x.shape),
    )
    parts = {"a": nn.Linear(half, half)} if knob % len(runs) < 2 else {}
    return Net(pick(runs, knob), half=half, **parts), d


def experts(d: int, knob: int) -> tuple[nn.Module, int]:
    """A soft mixture: every expert's output, weighted by a softmax over experts."""
    count, out = 2 + knob % 2, pick(WIDTHS, knob)

    def run(n: Net, x: Tensor) -> Tensor:
        made = torch.einsum("btd,edo->bteo", x, n.w)
        return (made * n.router(x).softmax(-1).unsqueeze(-1)).sum(2)

    return Net(run, w=weight(count, d, out), router=nn.Linear(d, count)), out


def bilinear(d: int, knob: int) -> tuple[nn.Module, int]:
    out = pick(WIDTHS, knob)
    return Net(lambda n, x: n.mix(x, n.side(x)), mix=nn.Bilinear(d, 4, out), side=nn.Linear(d, 4)), out


def shared(d: int, knob: int) -> tuple[nn.Module, int]:
    same = nn.Linear(d, d)
    return Net(lambda n, x: n.same(n.same(x).sigmoid()) + x * 0.5, same=same), d


def residual(inner: nn.Module, d: int, out: int, knob: int) -> tuple[nn.Module, int]:
    back = nn.Linear(out, d) if out != d or knob % 2 else nn.Identity()
    if knob % 3 == 2:
        return Net(lambda n, x: x + n.scale * n.back(n.inner(x)), inner=inner, back=back, scale=weight(d)), d
    return Net(lambda n, x: x + n.back(n.inner(x)), inner=inner, back=back), d


def dense(inner: nn.Module, d: int, out: int, knob: int) -> tuple[nn.Module, int]:
    return Net(lambda n, x: torch.cat([n.inner(x), x], -1), inner=inner), d + out


def head(d: int, knob: int) -> nn.Module:
    heads = (
        lambda: Net(lambda n, x: n.fc(x[:, -1]), fc=nn.Linear(d, 3)),
        lambda: Net(lambda n, x: n.fc(x.mean(1)), fc=nn.Linear(d, 3)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(5 * d, 3)),
        lambda: Net(lambda n, x: n.fc(n.norm(x)), norm=nn.LayerNorm(d), fc=nn.Linear(d, 3, bias=False)),
        lambda: Net(lambda n, x: x @ n.table.t(), table=weight(7, d)),
        lambda: Net(lambda n, x: n.fc(torch.cat([x.amax(1), x.mean(1)], -1)), fc=nn.Linear(2 * d, 3)),
    )
    return pick(heads, knob)()


BLOCKS: dict[str, Block] = {
    f.__name__: f
    for f in (
        linear, norm, activation, feed_forward, attention, grouped_query, torch_attention, recurrent, over_time,
        halves, experts, bilinear, shared,
    )
}  # fmt: skip
WRAPPERS = {f.__name__: f for f in (residual, dense)}
