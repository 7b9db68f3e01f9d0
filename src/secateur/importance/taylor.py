"""First-order Taylor expansion: by how much the loss would change, were a position not there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.importance.criterion import Criterion
from secateur.importance.gather import Context
from secateur.importance.gradients import Loss, mean_over_batches


@dataclass(frozen=True, eq=False)
class Taylor(Criterion):
    """The mean over batches of (Σ g·w)², summed over all weights that go with a position (Molchanov et al., 2019).

    >>> import secateur as sec, torch.nn.functional as F
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> batches = [(torch.randn(16, 4), torch.randint(2, (16,))) for _ in range(3)]
    >>> plan = sec.plan(sec.trace(net, batches[0][0]), sec.Ratio(0.5), importance=Taylor(batches, F.cross_entropy))
    >>> len(plan.axes[0].keep)
    4

    The sum is over every parameter that the cut touches: weights, biases and norms that make a position, and the
    weights that read it. `batches` is any iterable, or a function that makes one. `loss(model, batch)` gives a tensor
    with one element; a loss of torch's (a module, or a function of `torch.nn.functional`) is called with
    `model(inputs)` and `target` for batches that are pairs `(inputs, target)`. The model runs in eval mode and is left
    as it was.
    """

    batches: Any
    loss: Loss

    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""
        if self not in context.memo:
            context.memo[self] = mean_over_batches(
                context, self.batches, self.loss, "Taylor", of_weight=_itself, of_position=torch.square
            )
        return context.memo[self][context.axis]


def _itself(products: Tensor) -> Tensor:
    return products
