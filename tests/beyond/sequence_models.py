"""Transformers and other networks on sequences: caches, tables that grow, masks, heads."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beyond.harness import Case, Do, floats, whole


class RMSNorm(nn.Module):
    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class SwiGLU(nn.Module):
    def __init__(self, d: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(a, b, bias=False) for a, b in ((d, inner), (d, inner), (inner, d)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class CachedAttention(nn.Module):
    """Keys and values stay on the module, in a cache of a fixed length, as in many inference codes."""

    def __init__(self, d: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.longest = heads, d // heads, longest
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.cache_k: Tensor | None = None
        self.cache_v: Tensor | None = None

    def forward(self, x: Tensor, start: int) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, self.heads, self.head_dim) for f in (self.wq, self.wk, self.wv))
        if start == 0 or self.cache_k is None:
            self.cache_k = torch.zeros(b, self.longest, self.heads, self.head_dim)
            self.cache_v = torch.zeros(b, self.longest, self.heads, self.head_dim)
        self.cache_k[:, start : start + t] = k.detach()
        self.cache_v[:, start : start + t] = v.detach()
        keys, values = self.cache_k[:, : start + t].transpose(1, 2), self.cache_v[:, : start + t].transpose(1, 2)
        scores = q.transpose(1, 2) @ keys.transpose(2, 3) / math.sqrt(self.head_dim)
        if t > 1:
            mask = torch.full((t, start + t), float("-inf")).triu(start + 1)
            scores = scores + mask
        return self.wo((scores.softmax(-1) @ values).transpose(1, 2).reshape(b, t, -1))


class Llama(nn.Module):
    def __init__(self, d: int = 8, heads: int = 2, words: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.norm_a, self.attention = RMSNorm(d), CachedAttention(d, heads, 12)
        self.norm_m, self.mlp = RMSNorm(d), SwiGLU(d, 12)
        self.head = nn.Linear(d, words, bias=False)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.norm_a(x), start)
        x = x + self.mlp(self.norm_m(x))
        return self.head(x)


class GrownCache(nn.Module):
    """The cache is a list on the module that every call makes longer."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.into, self.head = nn.Linear(3, d), nn.Linear(d, 2)
        self.past: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        self.past.append((self.k(x).detach(), self.v(x).detach()))
        k, v = (torch.cat(parts, 1) for parts in zip(*self.past, strict=True))
        return self.head(x + self.o(F.scaled_dot_product_attention(self.q(x), k, v)))


class GroupedQuery(nn.Module):
    def __init__(self, d: int = 12, heads: int = 4, kv: int = 2) -> None:
        super().__init__()
        self.heads, self.kv, self.hd = heads, kv, d // heads
        self.into, self.out = nn.Linear(3, d), nn.Linear(d, 2)
        self.q, self.o = nn.Linear(d, heads * self.hd), nn.Linear(heads * self.hd, d)
        self.k, self.v = nn.Linear(d, kv * self.hd), nn.Linear(d, kv * self.hd)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.heads, self.hd).transpose(1, 2)
        k, v = (f(x).view(b, t, self.kv, self.hd).transpose(1, 2) for f in (self.k, self.v))
        k, v = (y.repeat_interleave(self.heads // self.kv, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x + self.o(y.transpose(1, 2).flatten(2)))


class Rotary(nn.Module):
    """Tables of cosines and sines on the module, made anew for a longer input."""

    def __init__(self, d: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.hd = heads, d // heads
        self.into, self.qkv, self.o, self.out = nn.Linear(3, d), nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 2)
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None

    def tables(self, t: int) -> tuple[Tensor, Tensor]:
        if self.cos is None or self.cos.shape[0] < t:
            rates = 1.0 / 100.0 ** (torch.arange(0, self.hd, 2) / self.hd)
            angles = torch.outer(torch.arange(t).to(rates), rates)
            self.cos, self.sin = angles.cos(), angles.sin()
        return self.cos[:t], self.sin[:t]

    def turn(self, x: Tensor) -> Tensor:
        cos, sin = self.tables(x.shape[-2])
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v)
        return self.out(x + self.o(y.transpose(1, 2).reshape(b, t, self.heads * self.hd)))


class GrownTable(nn.Module):
    """`self.pe`, sinusoids of the model's width for the longest input so far."""

    def __init__(self, ready: int = 0, d: int = 12, inner: int = 16) -> None:
        super().__init__()
        self.d = d
        self.embed, self.a, self.b, self.head = (
            nn.Linear(3, d),
            nn.Linear(d, inner),
            nn.Linear(inner, d),
            nn.Linear(d, 2),
        )
        self.pe = torch.zeros(0, d)
        self.extend(ready)

    def extend(self, t: int) -> None:
        if self.pe.size(0) < t:
            place = torch.arange(t).unsqueeze(1)
            rates = torch.exp(torch.arange(0, self.d, 2) * -(math.log(1000.0) / self.d))
            table = torch.zeros(t, self.d)
            table[:, 0::2], table[:, 1::2] = torch.sin(place * rates), torch.cos(place * rates)
            self.pe = table

    def forward(self, x: Tensor) -> Tensor:
        self.extend(x.size(1))
        x = self.embed(x) + self.pe[: x.size(1)]
        return self.head(x + self.b(F.gelu(self.a(x))))


class GrownLikeInput(GrownTable):
    """Made for four positions at first, then as wide as what it is added to."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.pe.size(0) < x.size(1):
            self.pe = torch.sin(torch.arange(x.size(1))[:, None] * 0.5 + torch.arange(x.size(-1)))
        x = x + self.pe[: x.size(1)]
        return self.head(x + self.b(F.gelu(self.a(x))))


class KeptTable(nn.Module):
    """A buffer of sinusoids for the longest input there can be."""

    def __init__(self, d: int = 12, longest: int = 16) -> None:
        super().__init__()
        place = torch.arange(longest).unsqueeze(1)
        rates = torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
        pe = torch.zeros(1, longest, d)
        pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(place * rates), torch.cos(place * rates)
        self.register_buffer("pe", pe, persistent=False)
        self.embed = nn.Embedding(9, d)
        self.layer = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))
        self.head = nn.Linear(d, 3)
        self.d = d

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * math.sqrt(self.d) + self.pe[:, : tokens.size(1)]
        return self.head(x + self.layer(x))


class TorchAttention(nn.Module):
    """`nn.MultiheadAttention` across two sequences, with a mask of padding."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, d), nn.Linear(3, d)
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 12), nn.GELU(), nn.Linear(12, 2))

    def forward(self, x: Tensor, y: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, y = self.a(x), self.b(y)
        mixed, weights = self.attention(x, y, y, key_padding_mask=padding)
        return self.mlp(x + mixed), weights


class Encoder(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, d, padding_idx=0)
        self.place = nn.Parameter(torch.randn(10, d) * 0.1)
        layer = nn.TransformerEncoderLayer(d, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        return self.head(self.encoder(x, src_key_padding_mask=tokens == 0)[:, 0])


class MaskedLogits(nn.Module):
    """Actions that are not allowed get a logit of -1e9, and their odds are what is used."""

    def __init__(self, actions: int = 5) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 16), nn.Linear(16, 12), nn.Linear(12, actions)
        self.gain = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.relu(self.a(x)))) * self.gain
        scale = 4.0 / h.shape[-1]
        return (self.head(h) * scale).masked_fill(~allowed, -1e9)


class TiedWords(nn.Module):
    """The embedding is the classifier; the width of the residual stream is a buffer's, too."""

    def __init__(self, words: int = 10, d: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.a, self.b = nn.Linear(d, 16), nn.Linear(16, d)
        self.head = nn.Linear(d, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((d,), 0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        return self.head(x + self.b(torch.relu(self.a(x))))


class Mixer(nn.Module):
    def __init__(self, d: int = 8, patches: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, d, 2, 2)
        self.tokens = nn.Sequential(nn.Linear(patches, 6), nn.GELU(), nn.Linear(6, patches))
        self.channels = nn.Sequential(nn.Linear(d, 12), nn.GELU(), nn.Linear(12, d))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.head = nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = x + self.tokens(self.norms[0](x).mT).mT
        x = x + self.channels(self.norms[1](x))
        return self.head(self.norms[2](x).mean(dim=1))


class Perceiver(nn.Module):
    """Learned latents read the input as often as asked, with the same weights."""

    def __init__(self, d: int = 8, latents: int = 3) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, d))
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(5, 2 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 16), nn.ReLU(), nn.Linear(16, d))
        self.head = nn.Linear(d, 2)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        z = self.latents.unsqueeze(0).repeat(x.shape[0], 1, 1)
        k, v = self.kv(x).chunk(2, -1)
        for _ in range(times):
            z = z + self.o(torch.softmax(torch.einsum("bld,btd->blt", self.q(z), k) * 0.3, -1) @ v)
            z = z + self.mlp(z)
        return self.head(z.mean(1))


class TCN(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8, 12)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for i, (a, b) in enumerate(zip((3, *widths), widths, strict=False)):
            conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(a, b, 2, dilation=2**i))
            self.blocks.append(nn.ModuleDict({"conv": conv, "short": nn.Conv1d(a, b, 1)}))
        self.head = nn.Linear(widths[-1], 2)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = F.relu(block["conv"](F.pad(x, (2**i, 0)))) + block["short"](x)
        return self.head(x[..., -1])


def tokens(*sizes: tuple[int, int]) -> list[Tensor]:
    return [1 + whole(8, *size, seed=i) for i, size in enumerate(sizes)]


def features(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [floats(*size, seed=i) for i, size in enumerate(sizes)]


CASES = (
    Case(
        "key-value cache on the module",
        Llama,
        lambda: [
            tokens((2, 4))[0],
            *[(t, 4 + i) for i, t in enumerate(tokens((2, 1), (2, 1), (2, 3)))],
            *tokens((3, 6)),
        ],
    ),
    Case("key-value cache that grows", GrownCache, lambda: features((2, 3, 3), (2, 1, 3), (2, 2, 3))),
    Case("grouped-query attention", GroupedQuery, lambda: features((2, 4, 3), (1, 7, 3), (3, 1, 3))),
    Case("rotary tables on demand", Rotary, lambda: features((2, 4, 3), (1, 7, 3), (3, 2, 3))),
    Case("sinusoids on demand", GrownTable, lambda: features((2, 3, 3), (1, 7, 3), (3, 2, 3), (1, 9, 3))),
    Case(
        "sinusoids made before, and again on demand",
        partial(GrownTable, 4),
        lambda: features((2, 3, 3), (1, 7, 3), (3, 2, 3)),
    ),
    Case(
        "sinusoids made before, and again as wide as the input",
        GrownLikeInput,
        lambda: features((2, 3, 3), (1, 7, 3), (3, 2, 3)),
    ),
    Case("sinusoids kept", KeptTable, lambda: tokens((2, 5), (1, 12), (3, 1))),
    Case(
        "multi-head attention of torch",
        TorchAttention,
        lambda: [
            (floats(2, 3, 3), floats(2, 4, 3)),
            (floats(1, 2, 3), floats(1, 5, 3), torch.tensor([[False] * 3 + [True] * 2])),
        ],
    ),
    Case("transformer encoder of torch", Encoder, lambda: [*tokens((2, 5), (3, 8)), torch.tensor([[3, 4, 0, 0]])]),
    Case(
        "mask of -1e9 in the logits",
        MaskedLogits,
        lambda: [(floats(n, 4), whole(2, n, 5, seed=n).bool()) for n in (3, 6)],
        exact=True,
    ),
    Case("tied words", TiedWords, lambda: tokens((2, 5), (1, 3))),
    Case("mixer", Mixer, lambda: features((2, 1, 4, 4), (5, 1, 4, 4))),
    Case(
        "perceiver",
        Perceiver,
        lambda: [floats(2, 4, 5), (floats(3, 7, 5), 3), Do(lambda m, x: m(x, times=2), floats(1, 1, 5))],
    ),
    Case("temporal convolutions", TCN, lambda: features((2, 3, 6), (3, 3, 9))),
)
