"""The trade-off as a picture: score against reduction, ours and every rival."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from benchmarks.accuracy.cutting import OURS
from benchmarks.accuracy.store import Record
from benchmarks.accuracy.tasks import Task
from matplotlib import pyplot
from matplotlib.axes import Axes


def curves(task: Task, records: list[Record], path: Path, command: str) -> None:
    """Two panels: right after the cut, and after fine-tuning."""
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    dense = next(r["score"] for r in records if r["stage"] == "dense")
    for panel, stages, title in zip(
        panels, (("cut", "screen"), ("tuned",)), ("right after the cut", "after fine-tuning"), strict=True
    ):
        panel.axhline(dense, color="grey", linewidth=0.8, linestyle=":", label="uncut")
        for method in dict.fromkeys(r["method"] for r in records if r["stage"] in stages):
            _line(panel, [r for r in records if r["stage"] in stages and r["method"] == method], method)
        panel.set(title=title, xlabel=f"times fewer {task.quantity}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel({"%": "accuracy, %"}.get(task.show(0)[-1], task.show(0).split()[0]))
    panels[0].legend(fontsize=6)
    figure.suptitle(f"{task.name}   ({command})", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _line(panel: Axes, records: list[Record], method: str) -> None:
    points: dict[float, list[float]] = {}
    for record in records:
        if "score" in record:
            points.setdefault(record["factor"], []).append(record["score"])
    x = sorted(points)
    ours = method == OURS.name
    panel.plot(
        x,
        [sum(points[factor]) / len(points[factor]) for factor in x],
        marker="o" if ours else ".",
        linewidth=2.2 if ours else 0.8,
        color="black" if ours else None,
        label=method,
    )
