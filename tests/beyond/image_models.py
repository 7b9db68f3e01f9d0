"""Networks on images, in the styles that people write them in."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beyond.harness import Case, floats


class FeedForward(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = (6, 16, 12, 3)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Basic(nn.Module):
    def __init__(self, c: int, out: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(c, out, 3, stride, 1, bias=False)
        self.norm_a = nn.BatchNorm2d(out)
        self.b = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_b = nn.BatchNorm2d(out)
        self.short = nn.Conv2d(c, out, 1, stride) if stride != 1 or c != out else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_b(self.b(F.relu(self.norm_a(self.a(x)))))
        y += x if self.short is None else self.short(x)
        return F.relu(y, inplace=True)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(Basic(8, 8, 1), Basic(8, 12, 2))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class Dense(nn.Module):
    """Every layer sees all that came before; the list of features is joined anew each time."""

    def __init__(self, growth: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + i * growth) for i in range(depth))
        self.convs = nn.ModuleList(nn.Conv2d(8 + i * growth, growth, 3, padding=1) for i in range(depth))
        self.head = nn.Conv2d(8 + depth * growth, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)))))
        return self.head(torch.cat(features, dim=1))


class UNet(nn.Module):
    """Pads odd sizes at the seams."""

    def __init__(self, widths: tuple[int, ...] = (8, 12, 16)) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in zip((3, *widths), widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for b, a in pairwise(widths))
        self.merge = nn.ModuleList(nn.Conv2d(2 * w, w, 3, padding=1) for w in widths[:-1])
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for i in reversed(range(len(self.up))):
            x, skip = self.up[i](x), skips.pop()
            dh, dw = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = F.pad(x, (0, dw, 0, dh))
            x = F.relu(self.merge[i](torch.cat((skip, x), 1)))
        return self.head(x)


class Inverted(nn.Module):
    """An expansion, a depthwise convolution, squeeze and excitation, a projection."""

    def __init__(self, c: int = 8, expand: int = 3) -> None:
        super().__init__()
        inner = c * expand
        self.stem = nn.Conv2d(3, c, 3, 2, 1)
        self.expand = nn.Conv2d(c, inner, 1)
        self.depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.squeeze = nn.Linear(inner, inner // 4)
        self.excite = nn.Linear(inner // 4, inner)
        self.project = nn.Conv2d(inner, c, 1)
        self.head = nn.Linear(c, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.hardswish(self.depthwise(F.relu6(self.expand(x))))
        b, c, *_ = y.shape
        gate = self.excite(F.relu(self.squeeze(y.mean((-1, -2))))).sigmoid().view(b, c, 1, 1)
        x = x + self.project(y * gate)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Grouped(nn.Module):
    def __init__(self, c: int = 12, groups: int = 3) -> None:
        super().__init__()
        self.groups = groups
        self.stem = nn.Conv2d(3, c, 1)
        self.a = nn.Conv2d(c, c, 3, padding=1, groups=groups)
        self.b = nn.Conv2d(c, c, 3, padding=1, groups=groups)
        self.head = nn.Conv2d(c, 2, 1)

    def shuffle(self, x: Tensor) -> Tensor:
        n, c, h, w = x.size()
        return x.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shuffle(F.relu(self.a(self.stem(x))))
        return self.head(F.relu(self.b(x)))


class SuperResolution(nn.Module):
    """Pixel shuffle, and a bilinear skip of the input to whatever size came out."""

    def __init__(self, width: int = 12, scale: int = 2) -> None:
        super().__init__()
        self.scale = scale
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.PReLU(width), nn.Conv2d(width, width, 1))
        self.up = nn.Sequential(nn.Conv2d(width, 4 * scale**2, 3, padding=1), nn.PixelShuffle(scale), nn.GELU())
        self.out = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.up(self.body(x)))
        return y + F.interpolate(x, size=y.shape[-2:], mode="bilinear", align_corners=False)


class Pyramid(nn.Module):
    """Lateral convolutions and a way down; the outputs are a dict of levels."""

    def __init__(self, widths: tuple[int, ...] = (8, 12), d: int = 8) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in zip((3, *widths), widths, strict=False))
        self.lateral = nn.ModuleList(nn.Conv2d(w, d, 1) for w in widths)
        self.head = nn.Conv2d(d, 5, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        levels = []
        for stage in self.stages:
            x = F.leaky_relu(stage(x), 0.1)
            levels.append(x)
        top, out = None, {}
        for i in range(len(levels) - 1, -1, -1):
            here = self.lateral[i](levels[i])
            if top is not None:
                here = here + F.interpolate(top, size=here.shape[2:], mode="nearest")
            top, out[f"p{i}"] = here, self.head(here)
        return out


class Spatial(nn.Module):
    """A grid is predicted, and the features are sampled there."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, c, 3, padding=1)
        self.offset = nn.Sequential(nn.Conv2d(c, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 2, 1), nn.Tanh())
        self.head = nn.Conv2d(c, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x).relu()
        h, w = y.shape[-2:]
        rows, columns = torch.linspace(-1, 1, h), torch.linspace(-1, 1, w)
        grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)
        grid = grid.unsqueeze(0) + 0.1 * self.offset(y).permute(0, 2, 3, 1)
        return self.head(F.grid_sample(y, grid, align_corners=True))


class Generator(nn.Module):
    """A vector becomes an image; the first feature map is a view of a linear layer."""

    def __init__(self, z: int = 6, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.first = nn.Linear(z, width * 4)
        self.norm = nn.BatchNorm2d(width)
        self.up = nn.ConvTranspose2d(width, width // 2, 4, 2, 1)
        self.out = nn.Conv2d(width // 2, 1, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.first(z).view(-1, self.width, 2, 2)
        return torch.tanh(self.out(F.relu(self.up(self.norm(x).relu()))))


class TimeBlock(nn.Module):
    def __init__(self, c: int, t: int) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.GroupNorm(4, c), nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)
        self.time = nn.Linear(t, 2 * c)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, dim=1)
        return x + self.b(F.silu(self.a(F.silu(self.norm(x))) * (1 + scale) + shift))


class Diffusion(nn.Module):
    def __init__(self, c: int = 8, t: int = 8) -> None:
        super().__init__()
        self.t = t
        self.time = nn.Sequential(nn.Linear(t, 16), nn.SiLU(), nn.Linear(16, t))
        self.stem, self.down = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, c, 3, 2, 1)
        self.blocks = nn.ModuleList([TimeBlock(c, t), TimeBlock(c, t)])
        self.out = nn.Conv2d(2 * c, 1, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        half = self.t // 2
        rates = torch.exp(-math.log(10000.0) * torch.arange(half) / half)
        angles = steps[:, None] * rates[None]
        t = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x = self.blocks[0](self.stem(x), t)
        y = F.interpolate(self.blocks[1](self.down(x), t), scale_factor=2.0)
        return self.out(torch.cat([x, y], 1))


def images(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [floats(*size, seed=i) for i, size in enumerate(sizes)]


CASES = (
    Case("feed-forward", FeedForward, lambda: images((4, 6), (9, 6), (2, 5, 6))),
    Case("residual", Residual, lambda: images((2, 3, 8, 8), (3, 3, 12, 10))),
    Case("concatenations", Dense, lambda: images((2, 3, 6, 6), (3, 3, 8, 5))),
    Case("U-Net", UNet, lambda: images((1, 3, 8, 8), (2, 3, 12, 10), (2, 3, 9, 7))),
    Case("inverted bottleneck", Inverted, lambda: images((2, 3, 8, 8), (3, 3, 12, 10))),
    Case("grouped convolution", Grouped, lambda: images((1, 3, 5, 5), (2, 3, 7, 4))),
    Case("pixel shuffle", SuperResolution, lambda: images((1, 3, 6, 6), (2, 3, 9, 7))),
    Case("feature pyramid", Pyramid, lambda: images((1, 3, 16, 16), (2, 3, 21, 12))),
    Case("sampled grid", Spatial, lambda: images((1, 1, 6, 6), (2, 1, 9, 7))),
    Case("GAN generator", Generator, lambda: images((2, 6), (5, 6))),
    Case(
        "diffusion U-Net",
        Diffusion,
        lambda: [(x, torch.arange(1.0, len(x) + 1)) for x in images((2, 1, 8, 8), (3, 1, 12, 4))],
    ),
)
