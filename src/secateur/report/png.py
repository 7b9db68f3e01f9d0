"""The report's figures as a picture, for a README or a paper."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from secateur.errors import MissingPackageError
from secateur.io.atomic import replacing
from secateur.io.file import about
from secateur.report.formatting import amount, change
from secateur.report.palette import colours
from secateur.report.payload import ties_modules
from secateur.report.sections import profile
from secateur.report.story import Story, Strand, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Tones = Mapping[str, str]

_MOST_LAYERS = 24
_MOST_NAMES = 26
_PER_LINE = 5
_PANEL_POINTS = 310  # how wide a panel on the right is


def write_png(story: Story, path: str | os.PathLike[str], *, dark: bool = False) -> None:
    """Write the report's figures as one picture, 1800 pixels wide.

    >>> import secateur as sec, tempfile, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> path = f"{tempfile.mkdtemp()}/report.png"
    >>> write_png(Story.of(graph, sec.plan(graph, sec.Ratio(0.5)), model="tiny"), path)
    >>> open(path, "rb").read(4)
    b'\\x89PNG'

    The same story gives the same bytes with the same matplotlib. A file at `path` is replaced once the new one is
    complete, and stays if anything goes wrong. Needs matplotlib.
    """
    drawn(path, partial(_draw, story), dark=dark)


def drawn(path: str | os.PathLike[str], draw: Callable[[Canvas, Tones], None], *, dark: bool) -> None:
    """Write what is drawn on a canvas, 1800 pixels wide."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ModuleNotFoundError as error:
        raise MissingPackageError("the picture needs matplotlib: pip install 'secateur[report]'") from error
    tones = colours(dark=dark)
    with matplotlib.rc_context(_style(tones)):
        canvas = Canvas(figsize=(12, 8.5), dpi=150, layout="constrained")
        FigureCanvasAgg(canvas)
        draw(canvas, tones)
        with about(path) as target, replacing(target, overwrite=True) as new:
            canvas.savefig(new, format="png", metadata={"Software": None})


def _style(tones: Tones) -> Any:
    ground = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), tones["paper"])
    ink = dict.fromkeys(("text.color", "axes.titlecolor"), tones["ink"])
    soft = dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), tones["soft"])
    lines = dict.fromkeys(("axes.edgecolor", "grid.color"), tones["line"])
    spines = {"axes.spines.top": False, "axes.spines.right": False}
    text = {"font.family": "DejaVu Sans", "font.size": 9, "axes.titlelocation": "left", "axes.titlesize": 11}
    return {**ground, **ink, **soft, **lines, **spines, **text, "text.parse_math": False, "legend.frameon": False}


def _draw(story: Story, canvas: Canvas, tones: Tones) -> None:
    canvas.suptitle(f"{story.model}\n{_headline(story)}", x=0.012, ha="left", fontsize=10.5, linespacing=1.7)
    curve = story.sweep and story.sweep.curve
    panels = [(_layers, story.layers), (_scores, _largest(story)), (_ties, story.axes), (_curve, curve)]
    wanted = {draw.__name__: draw for draw, given in panels if given}
    if not wanted:
        return
    # the layers, which have the most rows, fill the left; the others share the right
    left, *right = wanted
    places = canvas.subplot_mosaic([[left, name] for name in right or [left]])
    for name, draw in wanted.items():
        draw(story, places[name], tones)


def _headline(story: Story) -> str:
    said = []
    for figure in story.figures:
        moved = change(figure.values[0], figure.values[-1], figure.unit) if len(figure.values) > 1 else ""
        said.append(f"{figure.name} {amount(figure.values[-1], figure.unit)}" + (f" ({moved})" if moved else ""))
    lines = [said[i : i + _PER_LINE] for i in range(0, len(said), _PER_LINE)]
    return "\n".join("   ·   ".join(line) for line in lines)


def short(name: str, most: int = 30) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _layers(story: Story, axes: Axes, tones: Tones) -> None:
    rows = profile(story.layers, _MOST_LAYERS)
    places = np.arange(len(rows))
    tone = tones["before" if story.cut else "kept"]
    axes.barh(places, [row.before for row in rows], 0.78, color=tone, label="before")
    if story.cut:
        axes.barh(places, [row.after for row in rows], 0.42, color=tones["kept"], label="after")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
    axes.set_yticks(places, [short(row.module or "(top level)") for row in rows], family="monospace", size=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(lambda value, _: amount(value))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title("Where the work is: MACs")


def _largest(story: Story) -> Strand | None:
    """The axis whose cut saves most, if it has scores."""
    largest = max(story.axes, key=lambda axis: axis.macs, default=None)
    return largest if largest is not None and largest.scores is not None else None


def _scores(story: Story, axes: Axes, tones: Tones) -> None:
    strand = _largest(story)
    assert strand is not None
    assert strand.scores is not None
    scores = np.array(strand.scores)
    top = scores[np.isfinite(scores)].max(initial=0) or 1.0
    order = np.argsort(-scores, kind="stable")
    kept = np.isin(order, strand.keep)
    heights = np.minimum(scores, top)[order]
    at = np.arange(strand.size)
    width = max(0.6, 0.75 * _PANEL_POINTS / strand.size)  # lines, not bars: thousands of them stay quick to draw
    for mine, tone, name in ((kept, "kept", f"{len(strand.keep)} kept"), (~kept, "gone", f"{strand.removed} removed")):
        axes.vlines(at[mine], 0, heights[mine], color=tones[tone], linewidth=width, label=name, capstyle="butt")
    axes.set_xlim(-0.8, strand.size - 0.2)
    axes.set_ylim(0, top * 1.25)
    axes.legend(loc="upper right", ncols=2)
    axes.set_xlabel("positions by rank")
    axes.set_ylabel("score")
    axes.set_title(f"The axis that saves most: {short(strand.name, 36)}")


def _ties(story: Story, axes: Axes, tones: Tones) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    modules = {module: i for i, module in enumerate(ties_modules(story))}
    share = np.full((len(story.axes), max(len(modules), 1)), np.nan)
    for row, strand in enumerate(story.axes):
        for site in strand.sites:
            share[row, modules[site.tensor.rpartition(".")[0]]] = len(strand.keep) / strand.size
    scale = LinearSegmentedColormap.from_list("kept", [tones["gone"], tones["before"], tones["kept"]])
    seen = axes.imshow(share, cmap=scale, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    bar = axes.figure.colorbar(seen, ax=axes, fraction=0.04, pad=0.02, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["all gone", "half kept", "all kept"])
    bar.outline.set_visible(False)
    if len(story.axes) <= _MOST_NAMES:
        names = [short(strand.name) for strand in story.axes]
        axes.set_yticks(range(len(names)), names, family="monospace", size=7)
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{len(story.axes)} axes")
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{len(modules)} modules, first to last")
    axes.set_title("What is tied to what")


def _curve(story: Story, axes: Axes, tones: Tones) -> None:
    sweep = story.sweep
    assert isinstance(sweep, Sweep)
    left, metric = zip(*sorted(sweep.curve), strict=True)
    axes.plot(left, metric, color=tones["kept"], linewidth=2, marker="o", markersize=4)
    if sweep.whole is not None:
        axes.axhline(sweep.whole, color=tones["soft"], linewidth=0.8, linestyle="--")
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(linewidth=0.6)
    axes.set_xlabel(f"{sweep.cost} left")
    axes.set_ylabel(sweep.metric)
    axes.set_title("What a cut costs")
