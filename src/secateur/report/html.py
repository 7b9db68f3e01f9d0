"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

import os
from importlib.resources import files

from secateur.io.atomic import replacing
from secateur.io.file import about
from secateur.report.errors import MissingPackageError
from secateur.report.markup import Markup, data, joined, tag
from secateur.report.page import body
from secateur.report.palette import style
from secateur.report.payload import payload
from secateur.report.story import Story

_ICON = "data:,"  # a browser asks for an icon by itself unless it is told one


def write_html(story: Story, path: str | os.PathLike[str]) -> None:
    """Write the report as one file, with all that it needs inside.

    >>> import secateur as sec, tempfile, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> story = Story.of(graph, sec.plan(graph, sec.Ratio(0.5)), model="tiny")
    >>> path = f"{tempfile.mkdtemp()}/report.html"
    >>> write_html(story, path)
    >>> open(path, encoding="utf-8").read(15)
    '<!doctype html>'

    The same story gives the same bytes. A file at `path` is replaced once the new one is complete, and stays if
    anything goes wrong. Needs plotly, whose script it contains.
    """
    text = document(story)
    with about(path) as target, replacing(target, overwrite=True) as new:
        new.write_text(text, encoding="utf-8", errors="replace", newline="\n")


def document(story: Story) -> str:
    """The text of the page.

    >>> "https://" in document(Story("tiny", ("before",), ())).split("<body>")[0]
    False
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href=_ICON),
        tag("title", f"{story.model} – Secateur"),
        tag("style", Markup(style()), _asset("page.css")),
    )
    scripts = joined(
        tag("script", data(payload(story)), id="story", type="application/json"),
        tag("script", _plotly()),
        tag("script", _asset("charts.js")),
        tag("script", _asset("page.js")),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', body(story), scripts), lang='en')}\n"


def _asset(name: str) -> Markup:
    return Markup(files("secateur.report").joinpath("assets", name).read_text(encoding="utf-8"))


def _plotly() -> Markup:
    """Plotly's own script, as its package brings it."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise MissingPackageError("the report needs plotly: pip install 'secateur[report]'") from error
    return Markup(get_plotlyjs())
