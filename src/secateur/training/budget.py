"""How long training may go on: until a time, for a number of steps, or both."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field


@dataclass
class StepBudget:
    """Time and steps that are left, as a number of steps at the speed that was seen.

    >>> budget = StepBudget(deadline=math.inf, most=100)
    >>> budget.spend(30, seconds=3.0)
    >>> budget.left()
    70
    """

    deadline: float  # of time.perf_counter()
    most: float  # steps
    taken: int = 0
    _seconds: float = field(default=0.0, repr=False)
    _timed: int = field(default=0, repr=False)

    def spend(self, steps: int, seconds: float) -> None:
        """Note steps that were taken and the time they took, with all that goes with them."""
        self.taken += steps
        self._timed += steps
        self._seconds += seconds

    def left(self) -> int:
        """How many steps can still be taken."""
        steps = self.most - self.taken
        if math.isfinite(self.deadline) and self._timed:
            steps = min(steps, (self.deadline - time.perf_counter()) * self._timed / max(self._seconds, 1e-9))
        return max(0, math.floor(min(steps, 2**40)))

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.perf_counter() >= self.deadline
