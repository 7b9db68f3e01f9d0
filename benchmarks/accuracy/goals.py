"""What the benchmark is meant to show, and whether it does."""

import statistics
from dataclasses import dataclass

from benchmarks.accuracy.cutting import OURS, TIMELY
from benchmarks.accuracy.store import Record
from benchmarks.accuracy.tasks import Task

_OURS = (OURS.name, TIMELY.name)


@dataclass(frozen=True)
class Goal:
    """A sentence with its figures, and whether it came true."""

    text: str
    met: bool

    def __str__(self) -> str:
        return f"{'met   ' if self.met else 'MISSED'}  {self.text}"


def mean_score(records: list[Record], stage: str, factor: float, ours: bool, method: str = OURS.name) -> float | None:
    """The mean over the seeds of ours (or another method of ours), or of the best rival; None when there is none."""
    chosen = [r for r in records if r["stage"] == stage and r.get("factor") == round(factor, 4)]
    scores: dict[str, list[float]] = {}
    for record in chosen:
        wanted = record["method"] == method if ours else record["method"] not in _OURS
        if wanted and "score" in record:
            scores.setdefault(record["method"], []).append(record["score"])
    return max((statistics.mean(values) for values in scores.values()), default=None)


def goals(task: Task, records: list[Record]) -> list[Goal]:
    """Every goal that the records of a task have something to say about."""
    return [
        goal
        for goal in (
            _ninety_percent(task, records),
            _a_fifth_of_the_damage(task, records),
            _never_behind(task, records),
            _recovered(task, records),
            *_speed(task, records),
            _latency(task, records),
        )
        if goal is not None
    ]


def _ninety_percent(task: Task, records: list[Record]) -> Goal | None:
    if task.name != "resnet56":
        return None
    score = mean_score(records, "cut", 2.1, ours=True)
    found = "no result" if score is None else task.show(score)
    return Goal(f"resnet56 at 2.1x fewer MACs, no training, at least 90%: {found}", score is not None and score >= 90)


def _a_fifth_of_the_damage(task: Task, records: list[Record]) -> Goal:
    text = f"{task.name} at {task.goal:.2f}x, damage at most a fifth of the best rival's"
    dense = next(r["score"] for r in records if r["stage"] == "dense")
    ours, rival = (mean_score(records, "cut", task.goal, ours=mine) for mine in (True, False))
    stage = "cut" if rival is not None else "screen"  # a run that was interrupted may have no more
    rival = mean_score(records, stage, task.goal, ours=False)
    if ours is None:
        return Goal(f"{text}: no result", False)
    if rival is None:
        return Goal(f"{text}: {task.show(ours)}, and no rival could cut it", True)
    names = {r["method"] for r in records if r["stage"] == stage and r["method"] not in _OURS}
    best = [n for n in sorted(names) if mean_score(records, stage, task.goal, ours=True, method=n) == rival]
    shown = f"{task.show(ours)} and {task.show(rival)} ({', '.join(best)}), dense {task.show(dense)}"
    return Goal(f"{text}: {shown}", dense - ours <= max(0.0, dense - rival) / 5)


def _never_behind(task: Task, records: list[Record]) -> Goal | None:
    if not task.recoveries:
        return None
    text = f"{task.name}, never behind after equal fine-tuning"
    factors = sorted({r["factor"] for r in records if r["stage"] == "tuned"})
    shown, ahead = [], []
    for factor in factors:
        ours, rival = (mean_score(records, "tuned", factor, ours=mine) for mine in (True, False))
        words = ["no result" if score is None else task.show(score) for score in (ours, rival)]
        shown.append(f"{factor:.2f}x {words[0]} and {words[1]}")
        ahead.append(ours is not None and rival is not None and ours >= rival)
    return Goal(f"{text}: {', '.join(shown) or 'no result'}", bool(ahead) and all(ahead))


def _recovered(task: Task, records: list[Record]) -> Goal | None:
    ours, rival = (mean_score(records, "recovered", task.goal, ours=mine) for mine in (True, False))
    before = mean_score(records, "cut", task.goal, ours=True)
    if ours is None or before is None:
        return None
    shown = f"{task.show(before)} to {task.show(ours)}, the rival {'no result' if rival is None else task.show(rival)}"
    text = f"{task.name}, recover ends above the cut and the rival after the same recovery: {shown}"
    return Goal(text, ours >= before and (rival is None or ours >= rival))


def _speed(task: Task, records: list[Record]) -> list[Goal]:
    found = []
    for r in records:
        if r["stage"] == "timed" and r["method"] in _OURS and "speedup" in r:
            score = mean_score(records, "cut", r["factor"], ours=True, method=r["method"])
            found.append(
                Goal(
                    f"{task.name} at {r['factor']:.2f}x, at least 80% of the {task.quantity} reduction in measured "
                    "speed "
                    f"(batch {task.timed}, {r['method']}, {'no result' if score is None else task.show(score)}): "
                    f"{r['speedup']:.2f}x of {r['reduction']:.2f}x",
                    r["speedup"] >= 0.8 * r["reduction"],
                )
            )
    return found


def _latency(task: Task, records: list[Record]) -> Goal | None:
    for record in records:
        if record["stage"] == "latency":
            text = f"{task.name}, a latency target is met within 5%"
            if "error" in record:
                return Goal(f"{text}: {record['error']}", False)
            shown = f"asked {record['asked']:.2f} of the time, came {record['came']:.3f}"
            return Goal(f"{text}: {shown}", abs(record["came"] / record["asked"] - 1) <= 0.05)
    return None
