"""`--report`: what a command did, as a page and as a picture. What draws them is imported when it is needed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from secateur.cli.packages import optional
from secateur.importance import Importance
from secateur.pipeline.sweep import SweepResult
from secateur.planning import Plan
from secateur.tracing import Graph

NAMES = ("report.html", "report.png")


def check() -> None:
    """Refuse, before any work, where what draws a report is not installed."""
    for package in ("plotly", "matplotlib"):
        optional(package, "--report")


def story(
    graph: Graph,
    plan: Plan | None = None,
    *,
    importance: Importance | None = None,
    figures: Iterable[tuple[str, tuple[float, ...], str]] = (),
    sweep: SweepResult | None = None,
    **more: Any,
) -> Any:
    """The story of a model; its scores are asked for here, so before the model is cut."""
    from secateur.report import Figure, Story, Sweep, scores_of

    if importance is not None:
        more["scores"] = scores_of(graph, importance)
    if sweep is not None:
        curve = ((1.0, sweep.whole), *((point.macs, point.metric) for point in sweep.curve))
        alone = tuple((item.axis, item.point.metric) for item in sweep.axes if item.point is not None)
        more["sweep"] = Sweep(sweep.metric, curve, alone, sweep.whole)
    return Story.of(graph, plan, figures=[Figure(*figure) for figure in figures], **more)


def write(story: Any, folder: Path, name: str = "report") -> None:
    """The report as a page and as a picture."""
    from secateur.report import write_html, write_png

    write_html(story, folder / f"{name}.html")
    write_png(story, folder / f"{name}.png")
