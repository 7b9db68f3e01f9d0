"""Ridge regression from accumulated moments: weights that make outputs from other inputs.

To fit `y ≈ W x + b` on more rows than memory holds, the sums of x xᵀ, x yᵀ, x and y are enough. Inputs that hardly
vary, or vary together, would get weights that are large and wrong for other data; the ridge (Hoerl and Kennard, 1970)
holds W near where it was, not near zero, so that what the data do not tell stays as it is. How strong it has to be,
data tell that were held back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from secateur.calibrate.sums import added

_TIMES = (1, 10, 100, 1000)  # the ridges that are tried, as multiples of the least
_OUTPUTS = 128  # about as many as tell which ridge is best
_DOUBLE = 2**10  # columns up to which trials are in double precision


def _zero() -> Tensor:
    return torch.zeros((1, 1, 1), dtype=torch.float64)


@dataclass
class Moments:
    """Second moments of inputs and targets, accumulated in double precision, where the inputs are.

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

    def add(self, x: Tensor, y: Tensor, xx: Tensor | None = None) -> None:
        """Take in rows: x as (groups, rows, summed), y as (groups, rows, outputs); `xx` if it is known."""
        precise = torch.promote_types(x.dtype, torch.float32)
        x, y = x.to(precise), y.to(precise)
        self.rows += x.shape[1]
        ones = x.new_ones(1, x.shape[1])
        self.xx = added(self.xx, squared(x) if xx is None else xx)
        self.xy = added(self.xy, x.mT @ y)
        self.x = added(self.x, (ones @ x).squeeze(1))
        self.y = added(self.y, (ones @ y).squeeze(1))
        self.yy = added(self.yy, torch.linalg.vector_norm(y, dim=1).double().square())

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """All of them, and the rows."""
        return torch.tensor(self.rows), self.xx, self.xy, self.x, self.y, self.yy

    def cpu(self) -> Moments:
        """On the CPU."""
        return Moments(self.rows, *(value.cpu() for value in self.sums[1:]))

    def __add__(self, other: Moments) -> Moments:
        if not other.rows or not self.rows:
            return other if not self.rows else self
        mine, theirs = vars(self), vars(other)
        return Moments(**{name: value + theirs[name] for name, value in mine.items()})

    def single(self) -> Moments:
        """In single precision: half the memory and time."""
        return Moments(self.rows, *(value.float() for value in self.sums[1:]))

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

    def solve(self, start: Tensor, ridge: float, shift: bool) -> tuple[Tensor, Tensor]:
        """The weight (groups, outputs, summed) with the least squared error, held near `start`, and its shift."""
        xx, xy, _ = self.centred(shift)
        start = start.to(xx).mT
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
        return (self.y - (weight.to(self.x) @ self.x.unsqueeze(2)).squeeze(2)) / max(self.rows, 1)

    def error(self, weight: Tensor, shift: Tensor | None) -> Tensor:
        """The squared error of each output (groups, outputs) with a weight and a shift."""
        weight = weight.to(self.xx)
        cross = (weight * self.xy.mT).sum(2)
        square = ((weight @ self.xx) * weight).sum(2)
        plain = self.yy - 2 * cross + square
        if shift is not None:
            mean = self.y - (weight @ self.x.unsqueeze(2)).squeeze(2)
            plain = plain - 2 * shift * mean + self.rows * shift.square()
        return plain.clamp_min(0)  # below zero it is rounding


def squared(x: Tensor) -> Tensor:
    """The sum of x xᵀ over rows, group by group."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.mT @ x


def held_back(batches: int) -> frozenset[int]:
    """Which of some batches are not fitted to, but tell how well a fit does: one in eight, and one of four or more.

    >>> held_back(3), held_back(5), sorted(held_back(24))
    (frozenset(), frozenset({3}), [6, 14, 22])

    The last is not among them: of a DataLoader it is what was left over, if only one sample.
    """
    return frozenset(range(6, batches - 1, 8)) if batches >= 8 else frozenset({batches - 2} if batches >= 4 else ())


@dataclass
class Folds:
    """The moments of the batches that are fitted to and of those that are held back.

    Where there are too few batches for that, two halves of them judge each other.
    """

    held: frozenset[int]
    halves: tuple[Moments, Moments] = field(default_factory=lambda: (Moments(), Moments()))
    back: Moments = field(default_factory=Moments)

    @property
    def parts(self) -> tuple[Moments, Moments, Moments]:
        """All three."""
        return *self.halves, self.back

    @staticmethod
    def of_sums(held: frozenset[int], sums: Iterator[Tensor]) -> Folds:
        """As their `sums` say, one after the other."""
        one, other, back = (Moments(int(next(sums)), *(next(sums) for _ in range(5))) for _ in range(3))
        return Folds(held, (one, other), back)

    def of(self, batch: int) -> Moments:
        """Where the rows of a batch belong."""
        if batch in self.held:
            return self.back
        return self.halves[0 if self.held else batch % 2]

    @property
    def fit(self) -> Moments:
        """What is fitted to."""
        return self.halves[0] + self.halves[1]

    @property
    def judge(self) -> Moments:
        """What tells how good a fit is."""
        return self.back if self.back.rows else self.fit

    @property
    def scale(self) -> float:
        """The variance of the targets over all rows, for as many rows as judge: those may be few, or one."""
        every = self.fit + self.back
        return float(every.centred(True)[2].sum().clamp_min(1e-30)) * self.judge.rows / max(every.rows, 1)

    @property
    def trials(self) -> list[tuple[Moments, Moments]]:
        """What to fit to for a trial, and what to judge it by."""
        if self.back.rows:
            return [(self.fit, self.back)]
        one, other = self.halves
        return [(one, other), (other, one)] if one.rows and other.rows else []


def fitted(folds: Folds, start: Tensor, ridge: float, shift: bool) -> tuple[Tensor, Tensor]:
    """The weight with the least squared error and its shift, held near `start` as much as serves data not fitted to.

    >>> x = torch.randn(1, 400, 3)
    >>> folds = Folds(held_back(4))
    >>> for batch in range(4):
    ...     folds.of(batch).add(x, x @ torch.ones(1, 3, 1))
    >>> weight, shift = fitted(folds, torch.zeros(1, 1, 3), 1e-6, shift=True)
    >>> [round(float(v), 3) for v in weight.flatten()]
    [1.0, 1.0, 1.0]

    Of a few ridges, from `ridge` on, that which does best on the data that a trial is judged by.
    """
    trials = folds.trials
    if trials:
        every = slice(None, None, max(1, start.shape[1] // _OUTPUTS))
        some = start[:, every]
        trials = [(_trial(fit, every), _trial(judge, every)) for fit, judge in trials]
        least = float("inf")
        for one in [ridge * times for times in _TIMES]:
            error = _error(trials, some, one, shift)
            if not error < least:  # nor would it be with more
                break
            ridge, least = one, error
    return folds.fit.solve(start, ridge, shift)


def _trial(moments: Moments, every: slice) -> Moments:
    some = moments.some(every)
    return some.single() if some.xx.shape[2] > _DOUBLE else some


def _error(trials: Sequence[tuple[Moments, Moments]], start: Tensor, ridge: float, shift: bool) -> float:
    """What fits are off by on the data that they are judged by."""
    total = 0.0
    for fit, judge in trials:
        weight, shifts = fit.solve(start, ridge, shift)
        total += float(judge.error(weight, shifts if shift else None).sum())
    return total
