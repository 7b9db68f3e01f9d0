"""What happened, round by round. Values that print as a table."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Round:
    """One round: a cut and the recovery from it. Round 0 is the uncut model.

    >>> Round(1, part=0.5, macs=48, params=58, before=0.71, after=0.93, seconds=2.0).after
    0.93

    `part` is how much of the whole cut is done, `before` and `after` the metric between cut and fit and after both.
    The time is no part of what makes two rounds equal.
    """

    number: int
    part: float
    macs: int
    params: int
    before: float
    after: float
    seconds: float = field(compare=False)


@dataclass(frozen=True)
class Iteration:
    """The rounds of `iterate`, and which of them the model is left at.

    >>> rounds = (Round(0, 0.0, 64, 76, 0.95, 0.95, 0.1), Round(1, 0.5, 48, 58, 0.71, 0.93, 2.0))
    >>> print(Iteration(rounds, floor=0.9))
    round         MACs       params  after the cut  after the fit  seconds
        0  64 (100.0%)  76 (100.0%)                          0.95      0.1
      * 1  48  (75.0%)  58  (76.3%)           0.71           0.93      2.0
    * the model is left at round 1, the floor 0.9 is met
    """

    rounds: tuple[Round, ...]
    floor: float | None = None

    @property
    def best(self) -> Round:
        """The smallest model that meets the floor: the last, as each is cut further than the one before."""
        return next((r for r in reversed(self.rounds) if self.met(r)), self.rounds[0])

    @property
    def stopped(self) -> bool:
        """Whether there is nothing left to do: the whole cut is done, or the floor is missed."""
        return self.rounds[-1].part == 1 or not self.met(self.rounds[-1])

    def met(self, one: Round) -> bool:
        """Whether a round meets the floor; without one, every round does."""
        return self.floor is None or one.after >= self.floor  # never true of NaN

    def __str__(self) -> str:
        head = ("round", "MACs", "params", "after the cut", "after the fit", "seconds")
        rows = [head, *(self._row(r) for r in self.rounds)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"* {self._story()}"])

    def _row(self, r: Round) -> tuple[str, ...]:
        first = self.rounds[0]
        costs = [
            f"{n:,} {f'({n / max(whole, 1):.1%})':>8}" for n, whole in ((r.macs, first.macs), (r.params, first.params))
        ]
        mark = "* " if r is self.best else ""
        return f"{mark}{r.number}", *costs, f"{r.before:.4g}" if r.number else "", f"{r.after:.4g}", f"{r.seconds:.1f}"

    def _story(self) -> str:
        left, last = f"the model is left at round {self.best.number}", self.rounds[-1]
        if not self.met(last):
            return f"{left}: round {last.number} fell below the floor {self.floor:g}"
        floor = "" if self.floor is None else f", the floor {self.floor:g} is met"
        return f"{left}{', the target is met' if last.part == 1 else ''}{floor}"
