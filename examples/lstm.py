"""Cut the hidden units of an LSTM that reads digits row by row, and let it recover.

    python examples/lstm.py

Handwritten digits that come with scikit-learn, nothing to download, some seconds on one core.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import secateur as sec
from secateur.demo.nets import RowLSTM


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images[:, None] / 16, dtype=torch.float32)[order], torch.tensor(data.target)[order]


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x).argmax(1) == y).float().mean().item()


def main() -> tuple[RowLSTM, list[float]]:
    """The small model, and its accuracy before, after the cut and after recovery."""
    torch.manual_seed(0)
    x, y = digits()
    model = RowLSTM(row=8, width=48)
    train(model, x[:1200], y[:1200], 12)
    found = [accuracy(model, x[1200:], y[1200:])]
    graph = sec.trace(model, x[:1])
    print(graph)
    sec.apply(
        model, sec.plan(graph, sec.Params(0.4), importance=sec.Taylor([(x[:256], y[:256])], nn.CrossEntropyLoss()))
    )
    found.append(accuracy(model, x[1200:], y[1200:]))
    train(model, x[:1200], y[:1200], 4)
    found.append(accuracy(model, x[1200:], y[1200:]))
    print(f"hidden units per layer: 48 → {model.lstm.hidden_size}")
    print("accuracy: {:.1%} before, {:.1%} after the cut, {:.1%} after four epochs".format(*found))
    return model, found


if __name__ == "__main__":
    main()
