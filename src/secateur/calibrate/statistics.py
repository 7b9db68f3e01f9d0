"""The statistics of batch norms, taken anew: what a cut or zeros before them change is not in those that they have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from secateur.compat import BatchNorm


def has_statistics(model: nn.Module) -> bool:
    """Whether some layer of a model normalises by what training data had."""
    return bool(_norms(model))


@contextmanager
def statistics_anew(model: nn.Module) -> Iterator[None]:
    """Inside, batch norms take the mean and variance of everything that runs; all else is in eval mode.

    >>> norm = nn.BatchNorm1d(1)
    >>> with statistics_anew(norm):
    ...     _ = norm(torch.tensor([[1.0], [3.0]])), norm(torch.tensor([[5.0], [7.0]]))
    >>> norm.running_mean, norm.momentum
    (tensor([4.]), 0.1)
    """
    norms = _norms(model)
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
            norm.training = True
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm, momentum in momenta.items():
            norm.momentum = momentum


def _norms(model: nn.Module) -> list[BatchNorm]:
    return [m for m in model.modules() if isinstance(m, BatchNorm) and m.track_running_stats]
