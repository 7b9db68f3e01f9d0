"""Bring scores of different axes, or of different criteria, to one scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from secateur.errors import PlanError

Normalisation = Literal["none", "mean", "max", "sum"]

_SCALES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda sizes: torch.ones((), dtype=torch.float64),
    "mean": torch.mean,
    "max": torch.amax,
    "sum": torch.sum,
}


def check_normalisation(how: object) -> None:
    """Refuse what is not the name of a normalisation."""
    if how not in _SCALES:
        raise PlanError(f"normalise is one of {', '.join(map(repr, _SCALES))}, not {how!r}")


def normalised(scores: Tensor, how: Normalisation) -> Tensor:
    """Scores as multiples of their mean, largest or summed size.

    >>> normalised(torch.tensor([1.0, 2.0, 3.0]), "mean")
    tensor([0.5000, 1.0000, 1.5000], dtype=torch.float64)

    An infinite score stays infinite and has no part in the scale; scores that are all zero stay zero.
    """
    scores = scores.detach().to("cpu", torch.float64)
    sizes = scores[scores.isfinite()].abs()
    scale = _SCALES[how](sizes) if len(sizes) else torch.ones((), dtype=torch.float64)
    return scores / scale if scale > 0 else scores
