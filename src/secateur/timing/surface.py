"""The time of one op as a function of its sizes, from timings at a few of them. Mathematics only."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GRAINS = (1, 8, 16, 32)  # of how many positions kernels may round a size up to a multiple
SPAN = GRAINS[-1]
_CLEARLY = 0.5


@dataclass(frozen=True, eq=False)
class Surface:
    """Times at a grid of sizes, and what lies between.

    >>> line = Surface(((8, 16, 32),), np.array([1.0, 2.0, 4.0]), (1,))
    >>> line((24,)), line((4,))
    (3.0, 1.0)
    >>> stairs = Surface(((8, 16, 32),), np.array([1.0, 2.0, 4.0]), (16,))
    >>> stairs((17,)), stairs((32,)), stairs((16,))
    (4.0, 4.0, 2.0)

    Linear between the knots of each size, constant beyond them. A size that a kernel rounds up to a multiple of its
    grain costs what that multiple costs.
    """

    knots: tuple[tuple[int, ...], ...]
    times: NDArray[np.float64]
    grains: tuple[int, ...]

    def __call__(self, sizes: Sequence[int]) -> float:
        """The time at the given sizes."""
        spots = [_spot(ks, rounded(n, g)) for ks, n, g in zip(self.knots, sizes, self.grains, strict=True)]
        total = 0.0
        for corner in itertools.product(*spots):
            weight = math.prod(share for _, share in corner)
            total += weight * float(self.times[tuple(i for i, _ in corner)])
        return total


@dataclass(frozen=True, eq=False)
class Bulk:
    """Times by how many numbers an op is given, whichever of its sizes make them.

    >>> Bulk(math.prod, (0, 8, 16), (0.0, 1.0, 3.0))((2, 6))
    2.0
    """

    elements: Callable[[Sequence[int]], int]
    at: tuple[int, ...]
    times: tuple[float, ...]

    def __call__(self, sizes: Sequence[int]) -> float:
        """The time at the given sizes."""
        return float(np.interp(self.elements(sizes), self.at, self.times))


def rounded(size: int, grain: int) -> int:
    """The next multiple of the grain."""
    return -(-size // grain) * grain


def _spot(knots: Sequence[int], size: int) -> list[tuple[int, float]]:
    """The knots on both sides of a size, each with its share."""
    at = bisect_left(knots, size)
    if at in (0, len(knots)) or knots[at] == size:
        return [(min(at, len(knots) - 1), 1.0)]
    share = (size - knots[at - 1]) / (knots[at] - knots[at - 1])
    return [(at - 1, 1 - share), (at, share)]


def monotone(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """The times with dents smoothed out: along each size they never fall.

    >>> monotone(np.array([1.0, 3.0, 2.0, 4.0]))
    array([1. , 2.5, 2.5, 4. ])
    """
    for axis in range(times.ndim):
        above = np.maximum.accumulate(times, axis)
        below = np.flip(np.minimum.accumulate(np.flip(times, axis), axis), axis)
        times = (above + below) / 2
    return times


def knots(size: int, count: int) -> tuple[int, ...]:
    """Sizes to time at, `count` or fewer, up to the whole; multiples of what kernels like, where that is possible.

    >>> knots(512, 5), knots(64, 5), knots(3, 5), knots(256, 1)
    ((8, 128, 256, 384, 512), (8, 16, 32, 48, 64), (1, 2, 3), (256,))
    """
    if count == 1:
        return (size,)
    unit = next((u for u in (16, 8, 4) if size >= 4 * u), 1)
    inner = (unit * max(1, round(size * i / (count - 1) / unit)) for i in range(1, count - 1))
    lowest = min(unit, 8)
    return tuple(sorted({lowest, *(n for n in inner if lowest < n < size), size}))


def probes(size: int) -> tuple[int, ...]:
    """Sizes at which the grain shows: multiples of each grain, and one more than those.

    >>> probes(512)
    (96, 97, 112, 113, 120, 121, 128)
    >>> probes(48)
    ()
    """
    if size < 2 * SPAN:
        return ()
    top = max(2 * SPAN, round(size / 4 / SPAN) * SPAN)
    return (top - SPAN, top - SPAN + 1, top - 16, top - 15, top - 8, top - 7, top)


def grain(times: Mapping[int, float]) -> int:
    """The grain that explains the times at the probes; 1 unless another does so clearly better.

    >>> grain({n: float(rounded(n, 16)) for n in probes(256)}), grain({n: float(n) for n in probes(256)})
    (16, 1)
    """
    low, top = min(times), max(times)

    def misfit(grain: int) -> float:
        rise = (times[top] - times[low]) / (top - low)
        return sum((times[n] - times[low] - rise * (rounded(n, grain) - low)) ** 2 for n in times)

    best = min(GRAINS, key=misfit)
    return best if misfit(best) < _CLEARLY * misfit(1) else 1
