"""How many positions each axis keeps, so that as little importance as possible is lost within budgets.

This is a multiple-choice knapsack. Every axis, or group of axes whose counts depend on each other, is a *ladder* of
states, from whole (the first rung, where nothing is lost) to least. One rung of each is chosen: what all of them cost
together must be within every budget, and the importance that they lose should be as small as possible. The best choice
is NP-hard to find, and costs are products of counts, so not even additive. Three steps come close to it:

1. `descend`, always on the ladder that loses least importance for what it saves, until all budgets hold;
2. `climb` again wherever that still fits, as the last step went further than it had to;
3. `exchange` a step up here for steps down there, as long as less is lost.

Pruning as a knapsack is from Aflalo et al., "Knapsack pruning with inner distillation" (2020), and, with latency as the
cost, Shen et al., "Structural pruning via latency-saliency knapsack" (2022).
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from secateur.tracing.graph import Axis

AxisCounts = Mapping[Axis, int]

_RUNGS = 64  # steps in which an axis is cut at most; what the last one overshoots is given back
_EXCHANGES = 64, 2048  # that are tried of each size: at most, and over all ladders
_STEPS = (-1, 1, -2, 2, -4, 4)  # up and down a ladder, that others are adjusted to
_AHEAD = 32  # steps to look ahead where a cost has stairs


class Cost(Protocol):
    """What a model costs when axes keep so many positions."""

    @property
    def smooth(self) -> bool:
        """Whether every position counts; False for a cost with stairs, such as time."""

    def __call__(self, counts: AxisCounts) -> float: ...

    def saved(self, counts: AxisCounts, change: AxisCounts) -> float:
        """How much less it is after some counts change; quicker than the difference of two costs."""


@dataclass(frozen=True)
class Limit:
    """A cost that a choice of counts must not exceed."""

    name: str  # of the target, as it was written
    cost: Cost
    limit: float


@dataclass(frozen=True)
class Rung:
    """What the axes of a ladder keep, and the importance that is lost then."""

    counts: AxisCounts
    lost: float


Ladder = tuple[Rung, ...]  # the states of axes that move together, from whole to least


def losses(scores: Tensor) -> list[float]:
    """The importance that is lost when none, one, two, … positions go, the least important first."""
    return [0.0, *scores.sort().values.clamp_min(0).cumsum(0).tolist()]


def ladder(axis: Axis, scores: Tensor, least: int, step: int) -> Ladder:
    """The states of one axis by itself: its least important positions go first, `step` at a time or more."""
    lost = losses(scores)
    stride = -(-max(1, axis.size // _RUNGS) // step) * step
    counts = [axis.size, *range((axis.size - 1) // stride * stride, least, -stride), least]
    return tuple(Rung({axis: n}, lost[axis.size - n]) for n in dict.fromkeys(counts))


class Allocation:
    """A rung on each ladder, within limits as soon as enough was given up."""

    def __init__(self, ladders: Sequence[Ladder], limits: Sequence[Limit]) -> None:
        self._ladders, self._limits = ladders, limits
        self._at = [0] * len(ladders)
        self._ends = [len(one) for one in ladders]
        self.counts: dict[Axis, int] = {axis: n for one in ladders for axis, n in one[0].counts.items()}
        self._costs = [limit.cost(self.counts) for limit in limits]
        self._ahead = 1 if all(limit.cost.smooth for limit in limits) else _AHEAD

    @property
    def lost(self) -> float:
        """The importance that is given up."""
        return sum(one[at].lost for one, at in zip(self._ladders, self._at, strict=True))

    @property
    def used(self) -> float:
        """The part of its limit that the tightest one takes."""
        return max(cost / max(limit.limit, 1e-30) for cost, limit in zip(self._costs, self._limits, strict=True))

    def descend(self) -> bool:
        """Step down, always where least importance goes for what is saved, until every limit holds; whether it does."""
        heap = [(price[0], i) for i in range(len(self._ladders)) if (price := self._price(i)) is not None]
        heapq.heapify(heap)
        while any(self._over()) and heap:
            _, i = heapq.heappop(heap)
            price = self._price(i)  # savings shrink as others are cut, so a price from earlier is too low, if anything
            if price is None:
                continue
            if heap and price[0] > heap[0][0]:
                heapq.heappush(heap, (price[0], i))
                continue
            self._move(i, price[1])
            if (price := self._price(i)) is not None:
                heapq.heappush(heap, (price[0], i))
        return not any(self._over())

    def climb(self, but: int = -1) -> None:
        """Step back up where that fits, the most important for its cost first; on all ladders `but` one."""
        for i in sorted(range(len(self._ladders)), key=self._worth, reverse=True):
            while i != but and self._at[i] and self._fits(self._ladders[i][self._at[i] - 1].counts):
                self._move(i, self._at[i] - 1)

    def exchange(self) -> None:
        """Step up on one ladder and pay with steps down others, or the other way round, as long as less is lost."""
        for step in _STEPS:
            barren: set[int] = set()
            for _ in range(min(_EXCHANGES[0], _EXCHANGES[1] // max(1, len(self._ladders)))):
                open_ = [i for i in range(len(self._ladders)) if i not in barren and self._has(i, self._at[i] + step)]
                if not open_:
                    break
                i = max(open_, key=lambda i: -step * self._worth(i, step))
                before = (self.lost, dict(self.counts), list(self._at), list(self._costs))
                self._exchanged(i, step)
                if any(self._over()) or self.lost >= before[0]:
                    _, self.counts, self._at, self._costs = before
                    barren.add(i)

    def _exchanged(self, i: int, step: int) -> None:
        """A step on one ladder, and others adjusted to it."""
        self._move(i, self._at[i] + step)
        if step > 0:
            self.climb(but=i)
            return
        self._ends[i] = self._at[i] + 1
        if self.descend():
            self.climb()
        self._ends[i] = len(self._ladders[i])

    def _has(self, i: int, rung: int) -> bool:
        return 0 <= rung < len(self._ladders[i])

    def _over(self) -> list[float]:
        """By how much each limit is exceeded."""
        return [max(0.0, cost - limit.limit) for cost, limit in zip(self._costs, self._limits, strict=True)]

    def _costs_after(self, change: AxisCounts) -> list[float]:
        pairs = zip(self._costs, self._limits, strict=True)
        return [cost - limit.cost.saved(self.counts, change) for cost, limit in pairs]

    def _fits(self, change: AxisCounts) -> bool:
        return all(cost <= limit.limit for cost, limit in zip(self._costs_after(change), self._limits, strict=True))

    def _move(self, i: int, rung: int) -> None:
        change = self._ladders[i][rung].counts
        self._costs = self._costs_after(change)
        self.counts.update(change)
        self._at[i] = rung

    def _price(self, i: int) -> tuple[float, int] | None:
        """The cheapest step down a ladder: the importance that it loses for the share of the excess that it saves."""
        here, over = self._at[i], self._over()
        best: tuple[float, int] | None = None
        for rung in range(here + 1, min(here + 1 + self._ahead, self._ends[i])):
            after = self._ladders[i][rung]
            excess = [(limit, much) for limit, much in zip(self._limits, over, strict=True) if much > 0]
            saved = sum(limit.cost.saved(self.counts, after.counts) / much for limit, much in excess)
            if saved > 0:
                price = (after.lost - self._ladders[i][here].lost) / saved
                best = min(best, (price, rung)) if best else (price, rung)
        return best

    def _worth(self, i: int, step: int = -1) -> float:
        """The importance between a rung and the next for what lies between them in cost; up a ladder, or down."""
        if not self._has(i, self._at[i] + step):
            return -1.0
        here, there = self._ladders[i][self._at[i]], self._ladders[i][self._at[i] + step]
        cost = step * sum(
            limit.cost.saved(self.counts, there.counts) / max(limit.limit, 1e-30) for limit in self._limits
        )
        return step * (there.lost - here.lost) / cost if cost > 0 else float("inf")


def allocate(ladders: Sequence[Ladder], limits: Sequence[Limit]) -> Allocation | None:
    """Counts within all limits that lose little importance; None if even the lowest rungs do not fit."""
    allocation = Allocation(ladders, limits)
    if not allocation.descend():
        return None
    allocation.climb()
    allocation.exchange()
    return allocation
