"""What is drawn, made and updated on the way: masks, scans, routes, weights that a gradient changes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beyond.harness import Case, floats, whole


class Autoregressive(nn.Module):
    """MADE, whose masks are drawn anew in each run."""

    def __init__(self, n: int = 5, hidden: int = 10) -> None:
        super().__init__()
        self.n, self.hidden = n, hidden
        self.a, self.b = nn.Linear(n, hidden), nn.Linear(hidden, n)

    def forward(self, x: Tensor) -> Tensor:
        at, degree = torch.arange(self.n), torch.randint(0, self.n - 1, (self.hidden,))
        into, out = (degree[:, None] >= at).to(x.dtype), (at[:, None] > degree).to(x.dtype)
        return F.linear(F.linear(x, into * self.a.weight, self.a.bias).relu(), out * self.b.weight, self.b.bias)


class Selective(nn.Module):
    """Mamba: a causal depthwise convolution, and a scan whose steps depend on the data."""

    def __init__(self, d: int = 4, inner: int = 12, state: int = 4, rank: int = 2) -> None:
        super().__init__()
        self.inner, self.state, self.rank = inner, state, rank
        self.into, self.out = nn.Linear(d, 2 * inner, bias=False), nn.Linear(inner, d, bias=False)
        self.conv = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.select, self.steps = nn.Linear(inner, rank + 2 * state, bias=False), nn.Linear(rank, inner)
        self.log_a, self.skip = nn.Parameter(torch.randn(inner, state)), nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        x, gate = self.into(x).split([self.inner, self.inner], -1)
        x = F.silu(self.conv(x.mT)[:, :, :n].mT)
        steps, b, c = self.select(x).split([self.rank, self.state, self.state], -1)
        steps = F.softplus(self.steps(steps))
        keep = torch.exp(torch.einsum("bld,dn->bldn", steps, -torch.exp(self.log_a)))
        add = torch.einsum("bld,bln,bld->bldn", steps, b, x)
        h, seen = torch.zeros(x.shape[0], self.inner, self.state), []
        for i in range(n):
            h = keep[:, i] * h + add[:, i]
            seen.append(torch.einsum("bdn,bn->bd", h, c[:, i]))
        return self.out((torch.stack(seen, 1) + x * self.skip) * F.silu(gate))


class Dispatched(nn.Module):
    """Experts in one tensor, each with places for so many tokens; the others are dropped."""

    def __init__(self, d: int = 8, experts: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.experts = experts
        self.into, self.gate, self.out = nn.Linear(4, d), nn.Linear(d, experts, bias=False), nn.Linear(d, 2)
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, d, hidden)),
            nn.Parameter(torch.randn(experts, hidden, d)),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.into(x).flatten(0, -2)
        odds, chosen = self.gate(tokens).softmax(-1).max(-1)
        places = math.ceil(1.5 * len(tokens) / self.experts)
        hot = F.one_hot(chosen, self.experts)
        rank = ((hot.cumsum(0) - 1) * hot).sum(-1)
        sent = hot[..., None] * F.one_hot(rank.clamp(max=places - 1), places)[:, None] * (rank < places)[:, None, None]
        sent = sent.to(x.dtype)
        each = torch.bmm(torch.bmm(torch.einsum("tec,td->ecd", sent, tokens), self.up).relu(), self.down)
        return self.out(tokens + odds[:, None] * torch.einsum("tec,ecd->td", sent, each)).view(*x.shape[:-1], -1)


class Reversed(torch.autograd.Function):
    """What goes in is computed anew from what comes out, on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module, *_: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        with torch.no_grad():
            a = a + f(b)
            y = torch.cat([a, b + g(a)], 1)
        ctx.f, ctx.g = f, g
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (a, b), (da, db) = ctx.saved_tensors[0].chunk(2, 1), gradients[0].chunk(2, 1)
        with torch.enable_grad():
            there = a.detach().requires_grad_()
            made = ctx.g(there)
            of_g = torch.autograd.grad(made, [there, *ctx.g.parameters()], db)
            before = (b - made).detach().requires_grad_()
            da = da + of_g[0]
            of_f = torch.autograd.grad(ctx.f(before), [before, *ctx.f.parameters()], da)
        return torch.cat([da, db + of_f[0]], 1), None, None, *of_f[1:], *of_g[1:]


class Reversible(nn.Module):
    """RevNet."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, d, 1), nn.Conv2d(d, 2, 1)
        self.f, self.g = (
            nn.Sequential(nn.Conv2d(d // 2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, d // 2, 1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for f, g in ((self.f, self.g), (self.g, self.f)):
            x = Reversed.apply(x, f, g, *f.parameters(), *g.parameters())  # type: ignore[no-untyped-call]
        return self.out(x)


class Adapts(nn.Module):
    """MAML: a step along the gradient, with a rate for each weight, and then the answer."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, d), nn.Tanh(), nn.Linear(d, 2))
        self.rates = nn.ParameterList(torch.full_like(p, 0.01) for p in self.net.parameters())

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        steps = torch.func.grad(lambda w: torch.func.functional_call(self.net, w, (x,)).pow(2).sum())(weights)
        rates = dict(zip(weights, self.rates, strict=True))
        return torch.func.functional_call(self.net, {n: p - rates[n] * steps[n] for n, p in weights.items()}, (x,))


class Followed(nn.Module):
    """A codebook that follows averages of what is mapped to each entry, while it trains."""

    def __init__(self, d: int = 8, entries: int = 6) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, d), nn.Linear(d, 4)
        self.register_buffer("entries", torch.randn(entries, d))
        self.register_buffer("sums", self.entries.clone())
        self.register_buffer("counts", torch.ones(entries))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        rows = z.reshape(-1, z.shape[-1])
        chosen = torch.cdist(rows, self.entries).argmin(-1)
        code = F.embedding(chosen, self.entries).view_as(z)
        if self.training:
            hot = F.one_hot(chosen, len(self.counts)).to(rows.dtype)
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_((hot.T @ rows).detach(), alpha=0.1)
            self.entries.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])
        return self.decoder(z + (code - z).detach()), chosen


class EdgeAttention(nn.Module):
    """GAT: a softmax over the edges into each node, by heads."""

    def __init__(self, heads: int = 3, d: int = 5) -> None:
        super().__init__()
        self.heads, self.d = heads, d
        self.into, self.out = nn.Linear(3, heads * d, bias=False), nn.Linear(heads * d, 2)
        self.source, self.target = nn.Parameter(torch.randn(1, heads, d)), nn.Parameter(torch.randn(1, heads, d))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.into(x).view(-1, self.heads, self.d)
        s, t = edges
        a = F.leaky_relu((h * self.source).sum(-1)[s] + (h * self.target).sum(-1)[t], 0.2)
        most = torch.full((x.size(0), self.heads), -1e9).scatter_reduce(0, t[:, None].expand_as(a), a, "amax")
        a = (a - most[t]).exp()
        a = a / (torch.zeros(x.size(0), self.heads).index_add(0, t, a)[t] + 1e-16)
        where = t[:, None, None].expand(-1, self.heads, self.d)
        mixed = torch.zeros(x.size(0), self.heads, self.d).scatter_add(0, where, h[s] * a[..., None])
        return self.out(F.elu(mixed.view(-1, self.heads * self.d)))


class Filled(nn.Module):
    """A tensor that is filled with a size: cutting what it counts changes a number."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, d), nn.Linear(d, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        d = h.shape[-1]
        return self.out(self.b(h.clamp(max=d) * torch.full((1, d), d)).relu())


def many(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [floats(*size, seed=i) for i, size in enumerate(sizes)]


def graph(nodes: int, edges: int) -> tuple[Tensor, Tensor]:
    return floats(nodes, 3), whole(nodes, 2, edges)


CASES = (
    Case("masks drawn in forward", Autoregressive, lambda: many((3, 5), (4, 5))),
    Case("selective scan", Selective, lambda: many((2, 5, 4), (1, 9, 4), (3, 1, 4))),
    Case("experts with places", Dispatched, lambda: many((2, 5, 4), (1, 9, 4), (3, 1, 4))),
    Case("reversible blocks", Reversible, lambda: many((2, 3, 5, 5), (3, 3, 4, 6))),
    Case("weights a step further", Adapts, lambda: many((3, 4), (5, 4))),
    Case("codebook that follows", Followed, lambda: many((3, 5, 4), (5, 2, 4))),
    Case("attention over edges", EdgeAttention, lambda: [graph(4, 6), graph(7, 9), graph(3, 1)]),
    Case("filled with a size", Filled, lambda: many((3, 4), (5, 4))),
)
