"""Blocks of image networks, (batch, channels, 6, 6) in and out, written the ways that people write them.

Each is `block(channels, knob) -> (module, channels out)`; the knob picks a variant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from oracle import Net, weight

T = TypeVar("T")
Block = Callable[[int, int], tuple[nn.Module, int]]

WIDTHS = (8, 4, 6, 12, 5)
ACTIVATIONS: tuple[Callable[[int], nn.Module], ...] = (
    lambda c: nn.ReLU(),
    lambda c: nn.Sigmoid(),
    lambda c: nn.Softplus(),
    lambda c: nn.GELU(),
    lambda c: nn.PReLU(c),
    lambda c: nn.PReLU(),
    lambda c: nn.Hardswish(),
    lambda c: nn.Tanh(),
    lambda c: nn.ELU(inplace=True),
    lambda c: nn.ReLU6(inplace=True),
    lambda c: nn.Softmax(dim=1),
    lambda c: nn.Dropout(0.1),
)
NORMS: tuple[Callable[[int], nn.Module], ...] = (
    lambda c: nn.BatchNorm2d(c),
    lambda c: nn.BatchNorm2d(c, affine=False),
    lambda c: nn.BatchNorm2d(c, track_running_stats=False),
    lambda c: nn.GroupNorm(divisor(c, 0), c),
    lambda c: nn.GroupNorm(1, c),
    lambda c: nn.GroupNorm(c, c),
    lambda c: nn.GroupNorm(divisor(c, 0), c, affine=False),
    lambda c: nn.InstanceNorm2d(c, affine=True),
    lambda c: Net(lambda n, x: n.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm=nn.LayerNorm(c)),
    lambda c: Net(lambda n, x: F.normalize(x, dim=1) * n.gain, gain=weight(c, 1, 1)),
)


def pick(options: Sequence[T], knob: int) -> T:
    return options[knob % len(options)]


def divisor(n: int, knob: int) -> int:
    """A divisor of n above one, itself where it is prime."""
    return pick(tuple(d for d in range(2, n + 1) if n % d == 0), knob)


def conv(c: int, knob: int) -> tuple[nn.Module, int]:
    out = pick(WIDTHS, knob)
    kernel = 1 if knob % 2 else 3
    return nn.Conv2d(c, out, kernel, padding=kernel // 2, bias=knob % 3 != 0), out


def grouped(c: int, knob: int) -> tuple[nn.Module, int]:
    groups = divisor(c, knob)
    out = groups * (1 + knob % 3)
    return nn.Conv2d(c, out, 3, padding=1, groups=groups, bias=knob % 2 == 0), out


def depthwise(c: int, knob: int) -> tuple[nn.Module, int]:
    out = c * (1 + knob % 2)
    return nn.Conv2d(c, out, 3, padding=1, groups=c, bias=knob % 3 == 0), out


def transposed(c: int, knob: int) -> tuple[nn.Module, int]:
    groups = divisor(c, knob) if knob % 3 == 1 else 1
    out = groups * (2 + knob % 3)
    return nn.ConvTranspose2d(c, out, 3, padding=1, groups=groups, bias=knob % 2 == 0), out


def norm(c: int, knob: int) -> tuple[nn.Module, int]:
    return pick(NORMS, knob)(c), c


def activation(c: int, knob: int) -> tuple[nn.Module, int]:
    return pick(ACTIVATIONS, knob)(c), c


def pool(c: int, knob: int) -> tuple[nn.Module, int]:
    kinds = (nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.Upsample(scale_factor=1.0), nn.ReflectionPad2d(0))
    return pick(kinds, knob), c


def squeeze_excite(c: int, knob: int) -> tuple[nn.Module, int]:
    inner = 2 + knob % 4
    if knob % 2:
        run = lambda n, x: x * torch.sigmoid(n.b(F.relu(n.a(x.mean((2, 3), keepdim=True)))))  # noqa: E731
        return Net(run, a=nn.Conv2d(c, inner, 1), b=nn.Conv2d(inner, c, 1)), c
    run = lambda n, x: x * n.b(n.a(F.adaptive_avg_pool2d(x, 1).flatten(1)).relu()).sigmoid()[:, :, None, None]  # noqa: E731
    return Net(run, a=nn.Linear(c, inner), b=nn.Linear(inner, c)), c


def channel_shuffle(c: int, knob: int) -> tuple[nn.Module, int]:
    groups = divisor(c, knob)

    def view(n: Net, x: torch.Tensor) -> torch.Tensor:
        b, channels, h, w = x.shape
        return x.view(b, n.groups, channels // n.groups, h, w).transpose(1, 2).reshape(b, channels, h, w)

    if knob % 2:
        return nn.ChannelShuffle(groups), c
    return Net(view, groups=groups), c


def split(c: int, knob: int) -> tuple[nn.Module, int]:
    first = max(1, c // (2 + knob % 2))
    out = pick(WIDTHS, knob)

    def by_list(n: Net, x: torch.Tensor) -> torch.Tensor:
        a, b = x.split([n.first, n.rest], dim=1)
        return torch.cat([b, n.conv(a)], 1)

    def by_slice(n: Net, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([n.conv(x[:, : n.first]), x[:, n.first :]], 1)

    made = Net(by_slice if knob % 2 else by_list, conv=nn.Conv2d(first, out, 1), first=first, rest=c - first)
    return made, c - first + out


def gated(c: int, knob: int) -> tuple[nn.Module, int]:
    out = pick(WIDTHS, knob)

    def chunked(n: Net, x: torch.Tensor) -> torch.Tensor:
        a, b = n.conv(x).chunk(2, dim=1)
        return a * b.sigmoid()

    run = pick(
        (
            chunked,
            lambda n, x: F.glu(n.conv(x), 1),
            lambda n, x: F.softplus(n.conv(x)[:, n.out :]) * n.conv(x)[:, : n.out],
        ),
        knob,
    )
    return Net(run, conv=nn.Conv2d(c, 2 * out, 1), out=out), out


def shared(c: int, knob: int) -> tuple[nn.Module, int]:
    same = nn.Conv2d(c, c, 1 + 2 * (knob % 2), padding=knob % 2)
    return Net(lambda n, x: n.same(F.relu(n.same(x))) + (x if knob % 3 else 0), same=same), c


def pixel_shuffle(c: int, knob: int) -> tuple[nn.Module, int]:
    out = 2 + knob % 3
    if knob % 2:
        return nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(c, 4 * out, 1), nn.PixelShuffle(2)), out
    return nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(4 * c, out, 1), nn.Upsample(scale_factor=2.0)), out


def branches(c: int, knob: int) -> tuple[nn.Module, int]:
    out = pick(WIDTHS, knob)
    runs = (
        lambda n, x: n.a(x) * n.b(x).sigmoid(),
        lambda n, x: torch.stack([n.a(x), n.b(x)]).sum(0),
        lambda n, x: torch.maximum(n.a(x), n.b(x)),
        lambda n, x: torch.stack([n.a(x), n.b(x)], 2).flatten(1, 2),
        lambda n, x: torch.cat([n.a(x), n.b(x), n.a(x)], 1),
    )
    at = knob % len(runs)
    return Net(runs[at], a=nn.Conv2d(c, out, 1), b=nn.Conv2d(c, out, 3, padding=1)), out * (1, 1, 1, 2, 3)[at]


def contraction(c: int, knob: int) -> tuple[nn.Module, int]:
    out = pick(WIDTHS, knob)
    runs = (
        lambda n, x: torch.einsum("bchw,oc->bohw", x, n.w),
        lambda n, x: F.conv2d(x, n.w[:, :, None, None]),
        lambda n, x: (x.permute(0, 2, 3, 1) @ n.w.t()).permute(0, 3, 1, 2),
        lambda n, x: torch.tensordot(x, n.w, dims=([1], [1])).movedim(-1, 1),
    )
    return Net(pick(runs, knob), w=weight(out, c)), out


def gram(c: int, knob: int) -> tuple[nn.Module, int]:
    """Attention among pixels whose scores are products of the features themselves."""

    def run(n: Net, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(2)
        scores = torch.bmm(flat.transpose(1, 2), flat) * 0.1
        return torch.bmm(flat, scores.softmax(1)).view(x.shape)

    return Net(run), c


def scaled(c: int, knob: int) -> tuple[nn.Module, int]:
    runs = (
        lambda n, x: x * n.g.view(1, -1, 1, 1),
        lambda n, x: x * n.g[:, None, None] + n.g[:, None, None],
        lambda n, x: x + n.g.reshape(1, c, 1, 1).sigmoid(),
        lambda n, x: x / (1 + n.g[None, :, None, None].abs()),
    )
    return Net(pick(runs, knob), g=weight(c)), c


def residual(inner: nn.Module, c: int, out: int, knob: int) -> tuple[nn.Module, int]:
    back = nn.Conv2d(out, c, 1) if out != c or knob % 2 else nn.Identity()
    return Net(lambda n, x: x + n.back(n.inner(x)), inner=inner, back=back), c


def dense(inner: nn.Module, c: int, out: int, knob: int) -> tuple[nn.Module, int]:
    if knob % 2:
        return Net(lambda n, x: torch.cat([n.inner(x), x], 1), inner=inner), c + out
    return Net(lambda n, x: torch.cat([x, n.inner(x)], dim=1), inner=inner), c + out


def head(c: int, knob: int) -> nn.Module:
    heads = (
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 3)),
        lambda: Net(lambda n, x: n.fc(x.mean((-2, -1))), fc=nn.Linear(c, 3)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(c * 36, 3)),
        lambda: nn.Conv2d(c, 2, 1),
        lambda: Net(lambda n, x: n.fc(n.norm(x.mean((2, 3)))), norm=nn.LayerNorm(c), fc=nn.Linear(c, 3)),
        lambda: Net(lambda n, x: n.fc(x.amax((2, 3)).view(x.size(0), -1)), fc=nn.Linear(c, 3)),
    )
    return pick(heads, knob)()


BLOCKS: dict[str, Block] = {
    f.__name__: f
    for f in (
        conv, grouped, depthwise, transposed, norm, activation, pool, squeeze_excite, channel_shuffle, split, gated,
        shared, pixel_shuffle, branches, contraction, gram, scaled,
    )
}  # fmt: skip
WRAPPERS = {f.__name__: f for f in (residual, dense)}
