"""Train a ResNet on CIFAR-10 with Lightning; a penalty learns which channels go, until half of the MACs are left.

    python examples/penalty_lightning.py cifar-folder

The folder is that of torchvision's CIFAR10; `pip install pytorch-lightning timm`.
"""

from __future__ import annotations

import sys
from typing import Any

import pytorch_lightning as lightning
import timm
import torch
from torch.utils.data import DataLoader, Dataset

import secateur as sec
from secateur import training


class Classifier(lightning.LightningModule):
    """A small ResNet and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = timm.create_model("resnet10t", num_classes=10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def main(data: Dataset[Any], steps: int = 20_000, batch: int = 128, out: str = ".") -> tuple[Classifier, float]:
    """Train; the model, cut, and the part of the MACs that is left."""
    example = data[0][0].unsqueeze(0)
    learned = training.Learned(example, sec.Macs(0.5), steps=4 * steps // 5, method=training.GroupLasso())
    pruning = training.Pruning(learned)  # what is zero after 4/5 of the steps is cut, then it trains on
    model = Classifier()
    trainer = lightning.Trainer(max_steps=steps, callbacks=[pruning.lightning()], default_root_dir=out, logger=False)
    trainer.fit(model, DataLoader(data, batch_size=batch, shuffle=True, drop_last=True))
    print(f"{pruning.log()['macs_part']:.1%} of the MACs are left")
    return model, pruning.log()["macs_part"]


if __name__ == "__main__":
    from torchvision.datasets import CIFAR10
    from torchvision.transforms import ToTensor

    main(CIFAR10(sys.argv[1], transform=ToTensor(), download=True))
