"""Rounds of training: which rate, how long, and what came of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, stdev

import torch

from secateur.calibrate.blame import batch_name
from secateur.errors import TrainingError
from secateur.progress import progress
from secateur.training.budget import StepBudget
from secateur.training.checkpoint import RecoveryCheckpoint, RecoveryState
from secateur.training.holdout import Numbered, TrainingData
from secateur.training.lessons import Lessons
from secateur.training.outcome import Recovered, Trained

_RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # of Adam, which are tried from the third on
_FIRST = 2
_NEARLY = 1.1  # times the loss of the best trial
_TRIAL = 1 / 25  # of the budget
_LONGEST_TRIAL = 100  # steps
_STATISTICS = 20  # batches, for those of batch norms
_ROUND = 1000  # steps of the first round
_LONGER = 4  # times as long is each that follows: a rate that falls slowly leads further than several that fall fast
_LAST = 3  # times a round's length: with less than that left, it takes all that is left
_MOVING = 500  # steps of a round from which on batch norms are in training mode: better at length, worse at first
_WARM = 0.1  # the part of a round in which the rate rises
_WORTH = 0.995  # a round that leaves more than this of the loss brought nothing
_IDLE = 2  # so many such rounds in a row, and it ends
_SLOWER = 1 / 3  # after a round that ended worse than it began
_CLEAR = 2.0  # standard errors


def clearly_lower(after: Sequence[float], before: Sequence[float]) -> bool:
    """Whether losses on the same batches are lower, and by more than the best of a few tries may be by chance.

    >>> clearly_lower([0.8, 0.9], [1.0, 1.1]), clearly_lower([0.5, 1.4], [1.0, 1.0]), clearly_lower([0.9], [1.0])
    (True, False, True)

    Of one batch alone nothing is known of chance.
    """
    gains = [b - a for a, b in zip(after, before, strict=True)]
    error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return fmean(gains) > _CLEAR * error


@dataclass
class Search:
    """Short trials choose a rate; rounds follow, each four times as long, from the best so far."""

    lessons: Lessons
    data: TrainingData
    budget: StepBudget
    seed: int
    checkpoint: RecoveryCheckpoint | None

    def run(self) -> Recovered:
        """Everything that the budget allows; the model is left at the best."""
        losses, origin = self.lessons.losses(), self.lessons.values()
        distances = self.lessons.distances() if self.lessons.has_task else []
        before = fmean(losses)
        if not math.isfinite(before):
            raise TrainingError(f"recover: the loss on what is held back is {before}; the model puts out no numbers")
        self._before = self._loss = before
        self._rounds: list[Trained] = []
        self._best = origin
        self._long_rounds(self._resumed() or self._begun())
        self.lessons.put(self._best)
        kept = self._better(losses, distances)
        if not kept:
            self.lessons.put(origin)
        for parameter in self.lessons.model.parameters():
            parameter.grad = None
        return Recovered(tuple(self._rounds), tuple(self.lessons.same.layers), before, kept)

    def _better(self, losses: Sequence[float], distances: Sequence[float]) -> bool:
        """Whether the model does better than with some losses and distances from the teacher, and not by chance.

        A task's loss may hang on a few examples that it gets wrong; how far it is from the teacher tells more then.
        """
        now = self.lessons.losses()
        if clearly_lower(now, losses):
            return True
        told = bool(distances) and fmean(now) < fmean(losses)
        return told and clearly_lower(self.lessons.distances(), distances)

    def _begun(self) -> RecoveryState:
        self._statistics()
        rate = self._rate()
        return RecoveryState(self._rounds, rate, _ROUND, 0, self.budget.taken, self._best)

    def _resumed(self) -> RecoveryState | None:
        """Go on from a checkpoint."""
        found = None if self.checkpoint is None else self.checkpoint.resume()
        if found is not None:
            self._rounds = list(found.rounds)
            self._best = dict(found.values)
            self._loss = Recovered(found.rounds, (), self._before).after
            self.budget.spend(found.taken, sum(one.seconds for one in found.rounds))
        return found

    def _statistics(self) -> None:
        """Take those of batch norms anew, where that is better: they stay as they are in training."""
        start = time.perf_counter()
        if not self.lessons.take_statistics(islice(self.data.once(self.seed), _STATISTICS)):
            return
        one = Trained(0.0, 0, self._loss, self.lessons.judged(), time.perf_counter() - start)
        if one.better:
            self._rounds, self._best, self._loss = [one], self.lessons.values(), one.after
        else:
            self.lessons.put(self._best)

    def _rate(self) -> float:
        """The largest rate that does nearly as well in a short trial as any, found by going up or down from the middle.

        What a high rate spoils at first it makes up for in a longer round; what a low one leaves undone, it does not.
        """
        origin, start, length = self._best, self._loss, self._trial_length()
        found: dict[int, float] = {}
        trials: list[Trained] = []  # all on the same batches

        def tried(i: int) -> float:
            if i not in found:
                self.lessons.put(origin)
                one = self._round(_RATES[i], length, start)
                trials.append(one)
                found[i] = one.after if math.isfinite(one.after) else math.inf
                if found[i] < self._loss:
                    self._best, self._loss = self.lessons.values(), found[i]
            return found[i]

        at, best = _FIRST, tried(_FIRST)
        while at + 1 < len(_RATES) and tried(at + 1) < _NEARLY * best:
            at, best = at + 1, min(best, found[at + 1])
        while at <= _FIRST and at > 0 and _NEARLY * tried(at - 1) < found[at]:
            at -= 1
        self._rounds += trials
        return _RATES[at]

    def _trial_length(self) -> int:
        self._round(_RATES[0], min(2, self.budget.left()), math.inf)  # nothing is known of the speed yet
        left = self.budget.left()
        return min(_LONGEST_TRIAL, max(5, round(left * _TRIAL)), left)

    def _long_rounds(self, found: RecoveryState) -> None:
        rate, length, idle = found.rate, found.length, found.idle
        while idle < _IDLE and not self.budget.over and (left := self.budget.left()) > 0:
            self.lessons.put(self._best)
            one = self._round(rate, left if left < _LAST * length else length, self._loss)
            self._rounds.append(one)
            idle = 0 if one.after < _WORTH * self._loss else idle + 1
            if one.better:
                self._best, self._loss = self.lessons.values(), one.after
                length *= _LONGER
            else:
                rate *= _SLOWER
            if self.checkpoint is not None:
                self.checkpoint.commit(RecoveryState(self._rounds, rate, length, idle, self.budget.taken, self._best))

    def _round(self, rate: float, steps: int, before: float) -> Trained:
        """Train for some steps, the rate first rising, then falling to zero."""
        start = time.perf_counter()
        taken = 0
        moving = steps >= _MOVING and all(one.better for one in self._rounds if one.steps >= _MOVING)
        weights = [p for p in self.lessons.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
        for part, batch in self._batches(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(part / _WARM, 1.0) * 0.5 * (1 + math.cos(math.pi * part))
            optimizer.zero_grad()
            self.lessons.move_statistics(batch, moving)
            loss = self.lessons.loss(batch)
            if not taken and not bool(loss.isfinite()):  # not for a rate that is too high: no step was taken
                raise TrainingError(f"recover: {batch_name(batch[0])}: the loss is {loss.item()}; leave the batch out")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            taken += 1
            if not math.isfinite(loss.item()) or self.budget.over:
                break
        after = self.lessons.judged()
        seconds = time.perf_counter() - start
        self.budget.spend(taken, seconds)
        return Trained(rate, taken, before, after, seconds)

    def _batches(self, steps: int) -> Iterator[tuple[float, Numbered]]:
        """Batches, each with how far the round is then."""
        stream = islice(self.data.stream(self.seed + 1000 * len(self._rounds)), steps)
        for i, batch in enumerate(progress(stream, "recovering")):
            yield (i + 0.5) / steps, batch
