"""The trade-off as a picture: score against reduction, ours and every rival."""

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from benchmarks.accuracy.cutting import OURS, TIMELY
from benchmarks.accuracy.store import Record
from benchmarks.accuracy.tasks import Task
from matplotlib import pyplot
from matplotlib.axes import Axes

_COLOURS = {OURS.name: "black", TIMELY.name: "dimgrey"}


def curves(task: Task, records: list[Record], path: Path, command: str) -> None:
    """Two panels: right after the cut, and after fine-tuning."""
    figure, panels = pyplot.subplots(1, 2, figsize=(13, 4.4), sharey=True, sharex=True, layout="constrained")
    methods = list(dict.fromkeys(r["method"] for r in records if "score" in r and "method" in r))
    dense = next(r["score"] for r in records if r["stage"] == "dense")
    for panel, stages, title in zip(
        panels, (("cut", "screen"), ("tuned",)), ("right after the cut", "after fine-tuning"), strict=True
    ):
        panel.axhline(dense, color="grey", linewidth=0.8, linestyle=":", label="uncut")
        for i, method in enumerate(methods):
            _line(panel, _points(records, method, stages), method, _COLOURS.get(method, f"C{i % 10}"))
        panel.set(title=title, xlabel=f"times fewer {task.quantity}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel({"%": "accuracy, %"}.get(task.show(0)[-1], task.show(0).split()[0]))
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=6.5, loc="outside right upper")
    figure.suptitle(f"{task.name}   ({command})", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _points(records: list[Record], method: str, stages: tuple[str, ...]) -> dict[float, float]:
    """The mean score by reduction, from the first of the stages that has any: they are not the same test data."""
    points: dict[float, float] = {}
    mine = [record for record in records if record.get("method") == method and "score" in record]
    for factor in sorted({record["factor"] for record in mine}):
        by_stage = ([r["score"] for r in mine if r["stage"] == stage and r["factor"] == factor] for stage in stages)
        scores = next((scores for scores in by_stage if scores), None)
        if scores:
            points[factor] = statistics.mean(scores)
    return points


def _line(panel: Axes, points: dict[float, float], method: str, color: str) -> None:
    if points:
        ours = method == OURS.name
        marker, width = ("o", 2.2) if ours else (".", 0.8)
        panel.plot(list(points), list(points.values()), color=color, label=method, marker=marker, linewidth=width)
