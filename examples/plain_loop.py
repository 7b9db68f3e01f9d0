"""Prune in the middle of an ordinary training loop: the optimizer's state is cut along, and training goes on.

    python examples/plain_loop.py

Handwritten digits that come with scikit-learn, nothing to download, some seconds on one core.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import secateur as sec


def main() -> list[tuple[int, int, float]]:
    """Epoch, parameters and accuracy on unseen pictures, after each epoch."""
    torch.manual_seed(0)
    data = load_digits()
    order = torch.randperm(len(data.target))
    x, y = torch.tensor(data.data / 16, dtype=torch.float32)[order], torch.tensor(data.target)[order]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    whole = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    cuts = {4: 0.6, 7: 0.3}  # epoch: the part of the parameters that stays
    found = []
    for epoch in range(12):
        if epoch in cuts:
            left = sum(p.numel() for p in model.parameters()) / whole
            plan = sec.plan(sec.trace(model, x[:1]), sec.Params(cuts[epoch] / left))
            sec.apply(model, plan, optimizer=optimizer)
        for part in torch.randperm(1200).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
        params = sum(p.numel() for p in model.parameters())
        accuracy = (model(x[1200:]).argmax(1) == y[1200:]).float().mean().item()
        found.append((epoch, params, accuracy))
        print(f"epoch {epoch:>2}: {params:>6,} parameters, {accuracy:.1%}")
    return found


if __name__ == "__main__":
    main()
