"""Train a classifier of handwritten digits that has nine zeros in ten weights from the first step to the last.

    python examples/rigl.py

Real data (the digits that come with scikit-learn), nothing to download, a few seconds on one core.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from secateur import training

STEPS = 400


def main() -> tuple[float, float]:
    """Train; the fraction of zeros and the accuracy on the test data."""
    torch.manual_seed(0)
    data = load_digits()
    parts = train_test_split(data.data / 16, data.target, test_size=0.25, random_state=0)
    train_x, test_x = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    train_y, test_y = map(torch.tensor, parts[2:])

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    method = training.RigL(0.9, every=20, end=300)  # sparsity; connections change every 20 steps until step 300
    sparse = training.SparseTraining(model, optimizer, method)  # from here on, optimizer.step() does all of it

    for step in range(STEPS):
        chosen = torch.randint(0, len(train_x), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train_x[chosen]), train_y[chosen]).backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: {sparse.sparsity:.1%} zeros")

    model = sparse.finish()  # an ordinary model with zeros in its weights
    accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    print(f"{sparse.sparsity:.1%} zeros, {accuracy:.1%} right")
    return sparse.sparsity, accuracy


if __name__ == "__main__":
    main()
