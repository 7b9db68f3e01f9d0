"""Compress and train on several processes: each with its own data, all with one plan.

    torchrun --nproc-per-node 2 examples/several_processes.py FOLDER

Handwritten digits that come with scikit-learn, nothing to download. Every process has a part of them. What the parts
say together decides what is cut and how the rest is refitted; afterwards the model is sharded (FSDP2), trained, and
written as a checkpoint to which each process adds its own part.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import secateur as sec


def network() -> nn.Module:
    """As it is before it is cut, the same on every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def shard(model: nn.Module) -> None:
    """Spread a model over all processes."""
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
    """In step: gradients are averaged over all processes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for at in range(0, len(x) - 31, 32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[at : at + 32]), y[at : at + 32]).backward()
            optimizer.step()


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """On pictures that no process has learnt from."""
    return (model(x).argmax(1) == y).float().mean().item()


def main(folder: str) -> None:
    """Train, compress, shard, train on, save, load."""
    dist.init_process_group("gloo")
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    mine = slice(dist.get_rank(), 1200, dist.get_world_size())
    model = network()
    train(nn.parallel.DistributedDataParallel(model), x[mine], y[mine], 10)
    before = accuracy(model, x[1200:], y[1200:])
    report = sec.compress(model, x[:1], sec.Macs(0.4), x[mine].split(64), timed=False)
    after = accuracy(model, x[1200:], y[1200:])
    shard(model)
    train(model, x[mine], y[mine], 2)
    sec.save(model, Path(folder, "small"), sharded=True)
    with torch.device("meta"):
        fresh = network()
    sec.load(Path(folder, "small"), fresh, shard=shard)
    found = accuracy(fresh, x[1200:], y[1200:])
    if dist.get_rank() == 0:
        print(f"{report.macs}: {before:.1%} → {after:.1%} without training → {found:.1%} trained, saved and loaded")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
