"""`--report`: from what a command did to the story that a report tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from secateur.cli.packages import optional
from secateur.sweep import Sweep

NAMES = ("report.html", "report.png")


def check() -> None:
    """Refuse, before any work, where what draws a report is not installed."""
    for package in ("plotly", "matplotlib"):
        optional(package, "--report")


def write(story: Any, folder: Path, name: str = "report") -> None:
    """The report as a page and as a picture."""
    from secateur.report import write_html, write_png

    write_html(story, folder / f"{name}.html")
    write_png(story, folder / f"{name}.png")


def sweep_for_report(sweep: Sweep) -> Any:
    """A sweep as a report shows it."""
    from secateur.report import Sweep as Shown

    return Shown(
        metric=sweep.metric,
        curve=((1.0, sweep.whole), *((point.macs, point.metric) for point in sweep.curve)),
        sensitivity=tuple((item.axis, item.point.metric) for item in sweep.axes if item.point is not None),
        whole=sweep.whole,
    )
