"""What a recovery came to, round by round. Values that print as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Trained:
    """One round: at which rate, for how many steps, and the loss on what is held back before and after.

    >>> Trained(0.001, steps=200, before=0.5, after=0.25, seconds=3.0).better
    True
    """

    rate: float
    steps: int
    before: float
    after: float
    seconds: float = field(compare=False)

    @property
    def better(self) -> bool:
        """Whether it ended below where it began; never at NaN."""
        return self.after < self.before


@dataclass(frozen=True)
class Recovered:
    """What `recover` did. Losses are those on data that was held back.

    >>> print(Recovered((Trained(0.001, 200, 0.5, 0.25, 3.0), Trained(0.001, 400, 0.25, 0.3, 6.0)), ("0",), 0.5))
      rate  steps    loss  seconds
     0.001    200  0.2500      3.0
     0.001    400  0.3000      6.0  no better
    0.5 → 0.25 on data that was held back, 600 steps in 9 s; 1 layer compared with the teacher's
    """

    rounds: Sequence[Trained]
    layers: tuple[str, ...]  # inside, that were compared with those of the teacher
    before: float
    kept: bool = True  # whether the model is left at the best that was found

    @property
    def after(self) -> float:
        """The loss that the model is left with."""
        if not self.kept:
            return self.before
        return min((r.after for r in self.rounds if r.better), default=self.before)

    @property
    def steps(self) -> int:
        """How many were taken, trials included."""
        return sum(r.steps for r in self.rounds)

    @property
    def seconds(self) -> float:
        """How long all rounds took."""
        return sum(r.seconds for r in self.rounds)

    def __str__(self) -> str:
        lines = [f"{'rate':>6}  {'steps':>5}  {'loss':>6}  seconds"]
        for r in self.rounds:
            mark = "" if r.better else "  no better"
            lines.append(f"{r.rate:>6.1g}  {r.steps:>5}  {r.after:>6.4f}  {r.seconds:>7.1f}{mark}")
        inside = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'} compared with the teacher's"
        story = f"{self.before:.4g} → {self.after:.4g} on data that was held back"
        if not self.kept:
            story = f"{self.before:.4g} on data that was held back, as it was: nothing was clearly better"
        return "\n".join([*lines, f"{story}, {self.steps} steps in {self.seconds:.0f} s; {inside}"])
