"""Second-order expansion with a diagonal Hessian: optimal brain damage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.importance.criterion import Criterion
from secateur.importance.gather import Context
from secateur.importance.gradients import Loss, mean_over_batches


@dataclass(frozen=True, eq=False)
class Hessian(Criterion):
    """Σ ½·h·w² over all weights that go with a position (LeCun et al., 1989), h being the mean of g² over batches.

    >>> import secateur as sec, torch.nn.functional as F
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> samples = [(torch.randn(1, 4), torch.randint(2, (1,))) for _ in range(16)]
    >>> plan = sec.plan(sec.trace(net, samples[0][0]), sec.Ratio(0.5), importance=Hessian(samples, F.cross_entropy))
    >>> len(plan.axes[0].keep)
    4

    The mean of squared gradients is the diagonal of the empirical Fisher matrix, which stands for that of the Hessian
    at a minimum of a log-likelihood. Every batch counts, as one sample of the gradient: batches of one give the Fisher
    matrix proper, larger ones a cheaper, noisier picture of it. `batches` and `loss` are those of `Taylor`.
    """

    batches: Any
    loss: Loss

    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""
        if self not in context.memo:
            context.memo[self] = mean_over_batches(
                context, self.batches, self.loss, "Hessian", of_weight=torch.square, of_position=_half
            )
        return context.memo[self][context.axis]


def _half(sums: Tensor) -> Tensor:
    return sums / 2
