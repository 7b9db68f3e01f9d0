"""Small models, and data for them, that are run on the CPU and on a device."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.second = nn.Conv2d(12, 12, 3, padding=1)
        self.end = nn.Linear(12, 5)
        self.register_buffer("offset", torch.rand(12, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)) + self.offset)
        return self.end(F.relu(self.second(x) + x).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 2
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate, self.down = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (layer(h).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).softmax(3) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Words(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(20, 16), nn.ModuleList(Block(16) for _ in range(layers))
        self.norm, self.end = nn.RMSNorm(16), nn.Linear(16, 20, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.end(self.norm(x))


def images() -> nn.Module:
    torch.manual_seed(1)
    return Images().eval()


def words(layers: int = 2) -> nn.Module:
    torch.manual_seed(1)
    return Words(layers).eval()


def pictures(n: int = 2) -> list[Tensor]:
    return [torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(i)) for i in range(n)]


def texts(n: int = 2) -> list[Tensor]:
    return [torch.randint(20, (4, 7), generator=torch.Generator().manual_seed(i)) for i in range(n)]
