"""Cut a classifier of handwritten digits to a quarter of its work, in rounds, learning from the uncut model.

    python examples/iterate.py [folder]

Real data (the digits that come with scikit-learn), nothing to download, under a minute on one core. With a folder, stop
it whenever you like: the next run goes on where it was and ends with the same model.
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import secateur as sec


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def digits() -> list[Tensor]:
    """Training and test pictures and labels."""
    data = load_digits()
    parts = train_test_split(data.images / 16, data.target, test_size=0.25, random_state=0)
    return [torch.tensor(p, dtype=torch.float32 if p.dtype == float else torch.long) for p in parts]


def main(folder: str | None = None) -> sec.schedule.Iteration:
    """Train, then cut in rounds."""
    torch.manual_seed(0)
    train_x, test_x, train_y, test_y = digits()
    model = network()

    def train(loss: sec.Distill | None, epochs: int) -> None:
        model.train()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(epochs):
            for part in torch.randperm(len(train_x)).split(64):
                x, y = train_x[part], train_y[part]
                optimizer.zero_grad()
                out = model(x)
                (nn.functional.cross_entropy(out, y) if loss is None else loss(x, out, y)).backward()
                optimizer.step()

    @torch.no_grad()
    def accuracy(model: nn.Module) -> float:
        return (model.eval()(test_x).argmax(1) == test_y).float().mean().item()

    train(None, 8)
    distill = sec.Distill(model, temperature=2.0, alpha=0.7)
    found = sec.iterate(
        model,
        train_x[:1],
        sec.Macs(0.25),
        fit=lambda model: train(distill, 3),
        evaluate=accuracy,
        schedule=sec.schedule.cubic(4),
        floor=0.95,
        checkpoint=folder,
    )
    print(found)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
