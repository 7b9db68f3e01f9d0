"""Ridge regression from accumulated moments: weights that make outputs from other inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_TIMES = (1, 10, 100, 1000)  # the ridges that are tried, as multiples of the least
_OUTPUTS = 128  # about as many as tell which ridge is best
_DOUBLE = 2**10  # columns up to which trials are in double precision


def _zero() -> Tensor:
    return torch.zeros((1, 1, 1), dtype=torch.float64)


@dataclass
class Moments:
    """Second moments of inputs and targets, accumulated in double precision, on the CPU.

    >>> moments = Moments()
    >>> x = torch.tensor([[[0.0], [1.0], [2.0]]])
    >>> moments.add(x, 3 * x + 1)
    >>> weight, shift = moments.solve(torch.zeros(1, 1, 1), ridge=1e-9, shift=True)
    >>> [round(float(v), 6) for v in (weight, shift)]
    [3.0, 1.0]
    """

    rows: int = 0
    xx: Tensor = field(default_factory=_zero)  # (groups, summed, summed)
    xy: Tensor = field(default_factory=_zero)  # (groups, summed, outputs)
    x: Tensor = field(default_factory=lambda: _zero()[0])  # (groups, summed)
    y: Tensor = field(default_factory=lambda: _zero()[0])  # (groups, outputs)
    yy: Tensor = field(default_factory=lambda: _zero()[0])  # (groups, outputs)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in rows: x as (groups, rows, summed), y as (groups, rows, outputs)."""
        precise = torch.promote_types(x.dtype, torch.float32)
        x, y = x.to(precise), y.to(precise)
        self.rows += x.shape[1]
        self.xx = self.xx + (x.mT @ x).cpu()
        self.xy = self.xy + (x.mT @ y).cpu()
        ones = x.new_ones(1, x.shape[1])
        self.x = self.x + (ones @ x).squeeze(1).cpu()
        self.y = self.y + (ones @ y).squeeze(1).cpu()
        self.yy = self.yy + torch.linalg.vector_norm(y, dim=1).double().square().cpu()

    def __add__(self, other: Moments) -> Moments:
        mine, theirs = vars(self), vars(other)
        return Moments(**{name: value + theirs[name] for name, value in mine.items()})

    def single(self) -> Moments:
        """In single precision: half the memory and time."""
        return Moments(self.rows, *(value.float() for name, value in vars(self).items() if name != "rows"))

    def some(self, every: slice) -> Moments:
        """Of a part of the targets."""
        return Moments(self.rows, self.xx, self.xy[..., every], self.x, self.y[:, every], self.yy[:, every])

    def centred(self, shift: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The moments about the means, or about zero where no shift is free."""
        if not shift:
            return self.xx, self.xy, self.yy
        n = max(self.rows, 1)
        return (
            self.xx - self.x.unsqueeze(2) * self.x.unsqueeze(1) / n,
            self.xy - self.x.unsqueeze(2) * self.y.unsqueeze(1) / n,
            self.yy - self.y.square() / n,
        )

    def spread(self) -> Tensor:
        """The squares of the targets about their means (groups, outputs)."""
        return self.centred(True)[2]

    def solve(self, start: Tensor, ridge: float, shift: bool) -> tuple[Tensor, Tensor]:
        """The weight (groups, outputs, summed) with the least squared error, held near `start`, and its shift."""
        xx, xy, _ = self.centred(shift)
        start = start.to("cpu", xx.dtype).mT
        diagonal = xx.diagonal(dim1=1, dim2=2)
        pull = (ridge * diagonal.mean(1, keepdim=True)).clamp_min(1e-30)
        system = xx + torch.diag_embed(pull.expand_as(diagonal))
        factor, failed = torch.linalg.cholesky_ex(system)
        if failed.any():  # rounding made it singular
            system = system + torch.diag_embed(diagonal.amax(1, keepdim=True).expand_as(diagonal) * 1e-6 + 1e-30)
            factor, failed = torch.linalg.cholesky_ex(system)
        weight = start if failed.any() else start + torch.cholesky_solve(xy - xx @ start, factor)
        return weight.mT, self.shift(weight.mT) if shift else torch.zeros_like(self.y)

    def shift(self, weight: Tensor) -> Tensor:
        """The shift that makes the mean output right, as (groups, outputs)."""
        return (self.y - (weight.to("cpu", self.x.dtype) @ self.x.unsqueeze(2)).squeeze(2)) / max(self.rows, 1)

    def error(self, weight: Tensor, shift: Tensor | None) -> Tensor:
        """The squared error of each output (groups, outputs) with a weight and a shift."""
        weight = weight.to("cpu", self.xx.dtype)
        cross = (weight * self.xy.mT).sum(2)
        square = ((weight @ self.xx) * weight).sum(2)
        plain = self.yy - 2 * cross + square
        if shift is not None:
            mean = self.y - (weight @ self.x.unsqueeze(2)).squeeze(2)
            plain = plain - 2 * shift * mean + self.rows * shift.square()
        return plain.clamp_min(0)  # below zero it is rounding


def fitted(whole: Moments, folds: Sequence[Moments], start: Tensor, ridge: float, shift: bool) -> tuple[Tensor, Tensor]:
    """The weight with the least squared error and its shift, held near `start` as much as serves data not fitted to.

    >>> x = torch.randn(1, 400, 3)
    >>> folds = [Moments(), Moments()]
    >>> for fold in folds:
    ...     fold.add(x, x @ torch.ones(1, 3, 1))
    >>> weight, shift = fitted(folds[0] + folds[1], folds, torch.zeros(1, 1, 3), 1e-6, shift=True)
    >>> [round(float(v), 3) for v in weight.flatten()]
    [1.0, 1.0, 1.0]

    `folds` are two halves of the data. Of a few ridges, from `ridge` on, that with which a fit to one does best
    on the other.
    """
    halves = [fold for fold in folds if fold.rows]
    if len(halves) > 1:
        every = slice(None, None, max(1, start.shape[1] // _OUTPUTS))
        halves = [half.some(every) for half in halves]
        halves = [half.single() if half.xx.shape[2] > _DOUBLE else half for half in halves]
        some = start[:, every]
        least = float("inf")
        for one in [ridge * times for times in _TIMES]:
            error = _across(halves, some, one, shift)
            if not error < least:  # nor would it be with more
                break
            ridge, least = one, error
    return whole.solve(start, ridge, shift)


def _across(halves: Sequence[Moments], start: Tensor, ridge: float, shift: bool) -> float:
    """The error on each half of what is fitted to the other."""
    total = 0.0
    for one, other in zip(halves, reversed(halves), strict=True):
        weight, shifts = one.solve(start, ridge, shift)
        total += float(other.error(weight, shifts if shift else None).sum())
    return total
