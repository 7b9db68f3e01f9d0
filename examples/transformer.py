"""Cut attention and hidden units of a transformer; the width that its LayerNorms run over stays (exact cuts only).

    python examples/transformer.py

Handwritten digits that come with scikit-learn, nothing to download, some seconds on one core.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import secateur as sec


class RowTransformer(nn.Module):
    """Each row of a picture is a token."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.randn(8, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x) + self.place).mean(1))


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()


def main() -> tuple[RowTransformer, sec.Plan, list[float]]:
    """The small model, the plan, and the accuracy before, after the cut and after recovery."""
    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.tensor(data.images / 16, dtype=torch.float32), torch.tensor(data.target)
    model = RowTransformer()
    train(model, x[:1200], y[:1200], 12)
    found = [(model(x[1200:]).argmax(1) == y[1200:]).float().mean().item()]
    plan = sec.plan(sec.trace(model, x[:1]), sec.Macs(0.6), importance=sec.Wanda(x[:512].split(128)), exact=True)
    sec.apply(model, plan)
    found.append((model(x[1200:]).argmax(1) == y[1200:]).float().mean().item())
    train(model, x[:1200], y[:1200], 3)
    found.append((model(x[1200:]).argmax(1) == y[1200:]).float().mean().item())
    print(plan, "\naccuracy: {:.1%} before, {:.1%} after the cut, {:.1%} after three epochs".format(*found))
    return model, plan, found


if __name__ == "__main__":
    main()
