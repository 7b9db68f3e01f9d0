"""Layers that are not everyone's: norms of weights, spectra, samples, graphs, sets, memories, codebooks."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from torch.nn.utils.parametrizations import spectral_norm

from beyond.harness import Case, floats, whole


class Critic(nn.Module):
    """Spectral norm on every layer."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.a, self.b = spectral_norm(nn.Conv2d(1, d, 3, padding=1)), spectral_norm(nn.Conv2d(d, 12, 3, padding=1))
        self.out = spectral_norm(nn.Linear(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.b(F.leaky_relu(self.a(x), 0.2)), 0.2)
        return self.out(x.sum((2, 3)))


class Fourier(nn.Module):
    """Complex weights on the lowest frequencies."""

    def __init__(self, d: int = 8, modes: int = 3) -> None:
        super().__init__()
        self.modes = modes
        self.lift, self.skip, self.out = nn.Conv1d(2, d, 1), nn.Conv1d(d, d, 1), nn.Conv1d(d, 1, 1)
        kind = torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64
        self.weight = nn.Parameter(torch.randn(d, d, modes, dtype=kind) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        spectrum = torch.fft.rfft(x)
        low = torch.zeros_like(spectrum)
        low[..., : self.modes] = torch.einsum("bit,iot->bot", spectrum[..., : self.modes], self.weight)
        return self.out(F.gelu(torch.fft.irfft(low, n=x.size(-1)) + self.skip(x)))


class Mixed(nn.Module):
    """FNet: the real part of a transform over time, which no cut changes."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.into, self.up, self.down, self.out = nn.Linear(3, d), nn.Linear(d, 12), nn.Linear(12, d), nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        x = x + torch.fft.fft(x, dim=1).real
        return self.out(x + self.down(F.gelu(self.up(x))))


class Hyper(nn.Module):
    """A small network makes the weights of another."""

    def __init__(self, d: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.d, self.hidden = d, hidden
        self.make = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, hidden * d))
        self.into, self.out = nn.Linear(4, d), nn.Linear(hidden, 2)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        w = self.make(task).view(-1, self.hidden, self.d)
        h = torch.bmm(w, self.into(x).unsqueeze(-1)).squeeze(-1)
        return self.out(torch.relu(h))


class VAE(nn.Module):
    """Samples its code in eval mode too."""

    def __init__(self, d: int = 6, z: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d, 12), nn.ReLU())
        self.mean, self.spread = nn.Linear(12, z), nn.Linear(12, z)
        self.decoder = nn.Sequential(nn.Linear(z, 10), nn.ReLU(), nn.Linear(10, d))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(x)
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        kl = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(-1)
        return self.decoder(z), kl


class PointNet(nn.Module):
    """A transform of the points that is predicted, and a maximum over them."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU())
        self.turn_out = nn.Linear(8, 9)
        self.points = nn.Sequential(nn.Conv1d(3, d, 1), nn.BatchNorm1d(d), nn.ReLU(), nn.Conv1d(d, d, 1))
        self.head = nn.Linear(2 * d, 2)

    def forward(self, x: Tensor) -> Tensor:
        turn = self.turn_out(self.turn(x).amax(-1)).view(-1, 3, 3) + torch.eye(3)
        local = self.points(torch.bmm(turn, x))
        world = local.max(dim=2, keepdim=True).values.expand(-1, -1, x.size(2))
        return self.head(torch.cat([local, world], 1).transpose(1, 2))


class GraphNet(nn.Module):
    """Messages along edges, added up by index_add; degrees by scatter_add."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.embed, self.message, self.update = nn.Linear(3, d), nn.Linear(2 * d, 10), nn.Linear(d + 10, d)
        self.out = nn.Linear(d, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(self.embed(x))
        source, target = edges
        for _ in range(2):
            sent = torch.relu(self.message(torch.cat([h[source], h[target]], -1)))
            total = torch.zeros(h.shape[0], sent.shape[-1]).index_add(0, target, sent)
            degree = torch.zeros(h.shape[0]).scatter_add(0, target, torch.ones(len(target)))
            h = torch.relu(self.update(torch.cat([h, total / degree.clamp(min=1)[:, None]], -1)))
        return self.out(h)


class Momentum(nn.Module):
    """MoCo: a copy that follows, and a queue of the keys of earlier batches in a buffer."""

    def __init__(self, d: int = 8, length: int = 6) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, d))
        self.key = copy.deepcopy(self.query)
        for p in self.key.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(d, length), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self, keys: Tensor) -> None:
        for p, q in zip(self.key.parameters(), self.query.parameters(), strict=True):
            p.mul_(0.9).add_(q, alpha=0.1)
        for key in keys:
            self.queue[:, int(self.at)] = key
            self.at[0] = (self.at[0] + 1) % self.queue.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.query(x), dim=-1)
        with torch.no_grad():
            k = F.normalize(self.key(x * 1.1), dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone()], -1) / 0.2
        if self.training:
            self.follow(k)
        return logits


class Codebook(nn.Module):
    """VQ: the nearest entry of a table, straight through."""

    def __init__(self, d: int = 8, entries: int = 7) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, d))
        self.codes = nn.Embedding(entries, d)
        self.decoder = nn.Sequential(nn.Linear(d, 10), nn.ReLU(), nn.Linear(10, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        far = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codes.weight.t() + self.codes.weight.pow(2).sum(1)
        chosen = far.argmin(1)
        code = self.codes(chosen)
        return self.decoder(z + (code - z).detach()), chosen


class ComplexGate(nn.Module):
    """Features in pairs as complex numbers, turned by a learned angle."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, d), nn.Linear(d, 2)
        self.angle = nn.Parameter(torch.randn(d // 2))
        self.mix = nn.Linear(d, 10)
        self.back = nn.Linear(10, d)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.into(x))
        h = h + self.back(torch.relu(self.mix(h)))
        z = torch.view_as_complex(h.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
            torch.ones_like(self.angle), self.angle
        )
        return self.out(torch.view_as_real(z).flatten(-2))


class Mixture(nn.Module):
    """A mixture of normal distributions, by torch's own classes, which check what they are given."""

    def __init__(self, parts: int = 4, d: int = 10) -> None:
        super().__init__()
        self.parts = parts
        self.body = nn.Sequential(nn.Linear(3, d), nn.Tanh(), nn.Linear(d, d), nn.Tanh())
        self.odds, self.means, self.spreads = nn.Linear(d, parts), nn.Linear(d, 2 * parts), nn.Linear(d, 2 * parts)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if bool(torch.isnan(h).any()):
            raise ValueError("not a number")
        each = Normal(self.means(h).view(-1, self.parts, 2), self.spreads(h).view(-1, self.parts, 2).exp())
        return MixtureSameFamily(Categorical(logits=self.odds(h)), Independent(each, 1)).mean


class Turned(nn.Module):
    """One set of filters in four orientations."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.filters, self.out = nn.Parameter(torch.randn(d, 1, 3, 3)), nn.Conv2d(4 * d, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = [F.conv2d(x, torch.rot90(self.filters, k, (2, 3)), padding=1) for k in range(4)]
        return self.out(torch.cat(seen, 1).relu()).mean((2, 3))


class Bounded(nn.Module):
    """Words, and the weights of a layer, whose norms have a limit."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.words, self.mix, self.out = nn.Embedding(9, d, max_norm=0.5), nn.Linear(d, 12), nn.Linear(12, 2)

    def forward(self, words: Tensor) -> Tensor:
        weight = torch.renorm(self.mix.weight, 2, 0, 1.0)
        return self.out(torch.relu(F.linear(self.words(words), weight, self.mix.bias)).mean(1))


class Splines(nn.Module):
    """KAN: a spline for each input of each layer; something is divided by what its buffer holds."""

    def __init__(self, widths: tuple[int, ...] = (3, 8, 2), pieces: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for i, o in pairwise(widths):
            layer = nn.Module()
            layer.base = nn.Parameter(torch.randn(o, i) * 0.3)
            layer.spline = nn.Parameter(torch.randn(o, i, pieces + 1) * 0.3)
            knots = torch.arange(-1, pieces + 2).to(layer.base) * 2 / pieces - 1
            layer.register_buffer("knots", knots.repeat(i, 1))
            self.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            k, y = layer.knots, x.unsqueeze(-1)
            up = (y - k[:, :-2]) / (k[:, 1:-1] - k[:, :-2])
            down = (k[:, 2:] - y) / (k[:, 2:] - k[:, 1:-1])
            hats = torch.minimum(up, down).clamp(min=0)
            x = F.linear(F.silu(x), layer.base) + F.linear(hats.flatten(1), layer.spline.flatten(1))
        return x


def graph(nodes: int, edges: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return floats(nodes, 3, seed=seed), whole(nodes, 2, edges, seed=seed)


def many(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [floats(*size, seed=i) for i, size in enumerate(sizes)]


class StraightThrough(nn.Module):
    """Weights and activations in whole steps, as in training for integers."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Conv2d(3, c, 3), nn.Conv2d(c, 6, 1), nn.Conv2d(6, 2, 1)
        self.register_buffer("scale", torch.rand(c) + 0.1)
        self.register_buffer("zero", torch.zeros(c, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.get_buffer("scale").float()
        weight = torch.fake_quantize_per_channel_affine(self.a.weight, scale, self.get_buffer("zero"), 0, -128, 127)
        h = F.relu(F.conv2d(x, weight, self.a.bias))
        return self.out(F.relu(self.b(torch.fake_quantize_per_tensor_affine(h, 0.05, 0, 0, 255))))


class Unpooled(nn.Module):
    """SegNet: what was largest goes back to where it was."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, places = F.max_pool2d(self.a(x), 2, return_indices=True)
        return self.out(F.max_unpool2d(self.b(F.relu(h)), places, 2))


class InducedPoints(nn.Module):
    """Set Transformer: heads are split off by a width divided by their number, which nothing else tells."""

    def __init__(self, d: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.d, self.heads = d, heads
        self.points, self.enter, self.out = nn.Parameter(torch.randn(1, 3, d)), nn.Linear(3, d), nn.Linear(d, 2)
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def attend(self, q: Tensor, k: Tensor) -> Tensor:
        size, count = self.d // self.heads, q.shape[0]
        q, k, v = (torch.cat(x.split(size, 2), 0) for x in (self.q(q), self.k(k), self.v(k)))
        scores = torch.sigmoid(q.bmm(k.transpose(1, 2)))
        return torch.cat((q + scores.bmm(v)).split(count, 0), 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.out(self.attend(x, self.attend(self.points.repeat(len(x), 1, 1), x)))


CASES = (
    Case("in whole steps", StraightThrough, lambda: many((2, 3, 5, 5), (1, 3, 4, 6)), single=True),
    Case("unpooled", Unpooled, lambda: many((2, 3, 6, 6), (1, 3, 4, 8))),
    Case("points that attend", InducedPoints, lambda: many((2, 5, 3), (1, 8, 3))),
    Case("spectral norm", Critic, lambda: many((2, 1, 5, 5), (3, 1, 4, 7)), exact=False),
    Case("complex weights on a spectrum", Fourier, lambda: many((2, 2, 8), (1, 2, 11))),
    Case("transform over time", Mixed, lambda: many((2, 4, 3), (1, 7, 3))),
    Case("weights made by a network", Hyper, lambda: [(floats(n, 4), floats(n, 3)) for n in (2, 5)]),
    Case("VAE that samples", VAE, lambda: many((3, 6), (5, 6))),
    Case("PointNet", PointNet, lambda: many((2, 3, 6), (3, 3, 11))),
    Case("graph network", GraphNet, lambda: [graph(4, 6), graph(7, 9), graph(3, 1)]),
    Case("queue of a momentum encoder", Momentum, lambda: many((2, 4), (5, 4))),
    Case("codebook", Codebook, lambda: many((5, 4), (9, 4))),
    Case("mixture of distributions", Mixture, lambda: many((4, 3), (2, 3))),
    Case("turned filters", Turned, lambda: many((2, 1, 6, 6), (1, 1, 8, 7))),
    Case("norms with a limit", Bounded, lambda: [whole(9, 2, 4), whole(9, 1, 6)]),
    Case("splines", Splines, lambda: many((3, 3), (5, 3))),
    Case("complex features", ComplexGate, lambda: many((2, 4, 3), (3, 3))),
)
