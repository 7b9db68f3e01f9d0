"""A plain training loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.progress import progress

_BATCH = 64


def train(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, rate: float, seed: int, what: str) -> None:
    """Train in place, with AdamW and a rate that rises and falls; the same for the same seed."""
    pictures, labels = data
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    per_epoch = -(-len(labels) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * per_epoch)
    model.train()
    for _ in progress(range(epochs), what):
        for batch in torch.randperm(len(labels), generator=generator).split(_BATCH):
            loss = F.cross_entropy(model(pictures[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """The share of pictures that are told right."""
    model.eval()
    pictures, labels = data
    right = sum(
        int((model(p).argmax(1) == y).sum()) for p, y in zip(pictures.split(500), labels.split(500), strict=True)
    )
    return right / len(labels)
