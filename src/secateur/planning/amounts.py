"""How much a budget allows: a fraction of what the model has, or a number of its own.

A number up to 1 is a fraction, one above 100 is absolute: `Macs(0.5)`, `Macs(500e6)`. What lies between could be a
percentage and is refused. Seconds are small numbers too: of times, those below 0.1 are seconds, `Latency(0.008)`, as
nothing makes a model ten times faster. Text says it in any case: "500M", "8ms", "5%".
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from secateur.arguments import is_finite, shown
from secateur.errors import PlanError

_TEXT = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*(%|[^\W\d_]*)")


@dataclass(frozen=True)
class Unit:
    """What a budget counts: its name, what may follow a number, and from where on a number is a fraction.

    >>> COUNT.read("500M", "Macs"), COUNT.read(0.5, "Macs"), SECONDS.read("8ms", "Latency")
    ((500000000.0, True), (0.5, False), (0.008, True))
    """

    name: str
    example: str
    scales: Mapping[str, float]
    fractions_from: float = 0.0

    def read(self, given: object, budget: str) -> tuple[float, bool]:
        """The amount that a number or a text says, and whether it is absolute."""
        number, unit = self._split(given)
        wrong = (
            f"{budget} takes a fraction above 0, at most 1, or {self.name}, as in {budget}(0.5) or "
            f"{budget}({self.example}), not {shown(given)}"
        )
        if not 0 < number < math.inf:
            raise PlanError(wrong)
        if unit in self.scales:
            return number * self.scales[unit], True
        if unit == "%" and number <= 100:
            return number / 100, False
        if unit:
            raise PlanError(wrong)
        if 1 < number <= 100:
            raise PlanError(f"{wrong}, which could be a percentage: for {number:g}% write {budget}({number / 100:g})")
        return number, not self.fractions_from <= number <= 1

    @staticmethod
    def _split(given: object) -> tuple[float, str]:
        """The number and what follows it."""
        if isinstance(given, str) and (found := _TEXT.fullmatch(given.strip())):
            return float(found[1]), found[2]
        return (float(given), "") if is_finite(given) else (math.nan, "")


COUNT = Unit("a number", '"500M"', {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12})
BYTES = Unit("bytes", '"20MB"', {"kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30})
SECONDS = Unit("seconds", '"8ms"', {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}, fractions_from=0.1)

__all__ = ["BYTES", "COUNT", "SECONDS", "Unit"]
