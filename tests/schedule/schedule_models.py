"""Small models and data for the loop."""

import hashlib

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


def mlp(width: int = 16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


class Conv(nn.Module):
    """Convolutions with BatchNorm, a residual and attention: buffers, and a class that a cut may change."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x.view(-1, 1, 8, 8))))
        x = (x + torch.relu(self.conv(x))).flatten(2).transpose(1, 2)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def digits(count: int = 256) -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.data[:count] / 16, dtype=torch.float32), torch.tensor(data.target[:count])


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int = 1) -> None:
    """Order and dropout by the global generator."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model.eval()(x).argmax(1) == y).float().mean().item()


def digest(model: nn.Module) -> str:
    """Every bit of a model's state, its names and shapes."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()
