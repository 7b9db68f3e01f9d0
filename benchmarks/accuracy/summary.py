"""All results on one page: `benchmarks/results/accuracy.md`."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks.accuracy.cutting import OURS, TIMELY
from benchmarks.accuracy.store import Record
from benchmarks.accuracy.tasks import Task

_HEAD = """# Accuracy after a cut

Made by `python -m benchmarks.accuracy` from the results in this folder; each has the command that made it, all its
records and a picture. Right after the cut there is no training at all. The rival is the best of all ways of Torch-
Pruning 1.6.1 (screened on a part of the test data; "+ statistics": with batch-norm statistics recomputed for it), or,
where Torch-Pruning raises, plain magnitude cut by Secateur. Tuned is a fixed recipe; recovered is `sec.recover`, which
chooses its rate on training data that is held back; data and steps are the same for both. Means over the seeds, with
how many there were; times are of one thread, dense beside cut.

| model | fewer | dense | ours | rival | ours, tuned | rival, tuned | recovered | rival, recovered | faster | rival |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def write(folder: Path, tasks: Iterable[Task]) -> None:
    """Read every result of the tasks in a folder and put the page beside them."""
    lines, goals = [], []
    for task in tasks:
        for extent in ("full", "goal", "quick"):
            path = folder / f"accuracy-{task.name}-{extent}.json"
            if path.exists():
                found = json.loads(path.read_text())
                lines += list(_rows(task, found["records"]))
                goals += [f"- {goal}" for goal in found["goals"]]
                break
    parts = [_HEAD + "\n".join(lines), "## Goals", "\n".join(goals)]
    (folder / "accuracy.md").write_text("\n\n".join(parts) + "\n")


def _rows(task: Task, records: list[Record]) -> Iterable[str]:
    dense = next(task.show(r["score"]) for r in records if r["stage"] == "dense")
    for factor in sorted({r["factor"] for r in records if r["stage"] == "cut"}):
        mine = [r for r in records if r.get("factor") == factor]
        stage, rival = _rival(mine)
        none = "none could" if any(r["library"] != "secateur" for r in mine) else "not measured"
        for ours in (OURS.name, TIMELY.name):
            if any(r["method"] == ours and r["stage"] == "cut" for r in mine):
                extra = "" if ours == OURS.name else " and in time"
                shown = [("cut", ours), (stage, rival)]
                shown += [(after, whose) for after in ("tuned", "recovered") for whose in (ours, rival)]
                scores = [_mean(task, mine, *what) for what in shown]
                cells = [f"{task.name}{extra}", f"{factor:.2f}x {task.quantity}", dense, *scores]
                yield f"| {' | '.join([*cells, _speed(mine, ours), rival or none])} |"


def _rival(records: list[Record]) -> tuple[str, str | None]:
    """The best of the others, in the last stage that it was measured in."""
    for stage in ("cut", "screen"):
        found = [r for r in records if r["stage"] == stage and r["library"] != "secateur" and "score" in r]
        if found:
            return stage, max(found, key=lambda r: r["score"])["method"]
    return "cut", None


def _mean(task: Task, records: list[Record], stage: str, method: str | None) -> str:
    found = [r for r in records if r["stage"] == stage and r["method"] == method]
    scores = [r["score"] for r in found if "score" in r]
    if not scores:
        return "failed" if found else "–"
    return task.show(statistics.mean(scores)) + (f" ({len(scores)})" if len(scores) > 1 else "")


def _speed(records: list[Record], method: str) -> str:
    return next((f"{r['speedup']:.2f}x" for r in records if r["method"] == method and "speedup" in r), "–")
