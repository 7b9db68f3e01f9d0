"""Train with masks on rising levels, then remove what they masked: a classifier and an LSTM on handwritten digits.

    python examples/masks_to_cuts.py

Real data (the digits that come with scikit-learn), nothing to download, under a minute on one core.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from secateur import ao


class Rows(nn.Module):
    """Reads a picture row by row with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x.view(-1, 8, 8))
        return self.head(out[:, -1])


def digits() -> list[Tensor]:
    """Training and test pictures and labels."""
    data = load_digits()
    parts = train_test_split(data.data / 16, data.target, test_size=0.25, random_state=0)
    return [torch.tensor(p, dtype=torch.float32 if p.dtype == float else torch.long) for p in parts]


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x).argmax(1) == y).float().mean().item()


def main() -> dict[str, tuple[float, float, float, float]]:
    """Accuracy before, masked and removed, and the share of parameters left, of each model."""
    train_x, test_x, train_y, test_y = digits()
    found = {}
    for name, model, pruner, layer in (
        (
            "perceptron",
            nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)),
            ao.SaliencyPruner({"sparsity_level": 0.0}),
            ["0.weight", "2.weight"],
        ),
        (
            "LSTM",
            Rows(),
            ao.LSTMSaliencyPruner({"sparsity_level": 0.0}, coherent=True),
            ["lstm.weight_ih_l0", "lstm.weight_hh_l0"],
        ),
    ):
        torch.manual_seed(0)
        train(model, train_x, train_y, 10)
        before, size = accuracy(model, test_x, test_y), sum(p.numel() for p in model.parameters())
        pruner.prepare(model, [{"tensor_fqn": tensor, "sparsity_level": 0.5} for tensor in layer])
        schedule = ao.CubicSL(pruner, init_sl=0.0, init_t=0, delta_t=1, total_t=8, initially_zero=True)
        for _ in range(10):
            pruner.step()
            train(model, train_x, train_y, 1)
            schedule.step()
        pruner.step()
        train(model, train_x, train_y, 2)
        masked = accuracy(model, test_x, test_y)
        pruner.prune(example=test_x[:2])
        removed = accuracy(model, test_x, test_y)
        left = sum(p.numel() for p in model.parameters()) / size
        found[name] = (before, masked, removed, left)
        print(
            f"{name:<11} {before:.1%} before, {masked:.1%} masked, {removed:.1%} removed, {left:.0%} of the parameters"
        )
    return found


if __name__ == "__main__":
    main()
