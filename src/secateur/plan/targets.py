"""What a plan aims at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from secateur.errors import PlanError


@dataclass(frozen=True)
class Ratio:
    """Remove the fraction `ratio` of every axis.

    >>> Ratio(0.5).removed("any axis", 64)
    32

    A mapping gives ratios by axis name or by the name of a tensor that the axis is part of, as globs:
    `Ratio({"layer4.*": 0.3})` leaves every other axis whole.
    """

    ratio: float | Mapping[str, float]

    def __post_init__(self) -> None:
        for value in self.ratio.values() if isinstance(self.ratio, Mapping) else (self.ratio,):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise PlanError(f"a ratio is a number from 0 up to (not including) 1, not {value!r}")

    def removed(self, name: str, size: int) -> int:
        """How many of an axis's positions go."""
        assert not isinstance(self.ratio, Mapping)
        return min(int(size * self.ratio + 1e-9), size - 1)
