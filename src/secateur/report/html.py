"""The report as one HTML file that needs nothing else."""

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from secateur.errors import MissingPackageError
from secateur.io.atomic import replacing
from secateur.io.file import about
from secateur.report.formatting import amount, change, digits
from secateur.report.palette import PALETTE
from secateur.report.payload import payload, ties
from secateur.report.sections import sections
from secateur.report.story import Shape, Story, Strand
from secateur.tracing.graph import Site

Ties = Mapping[tuple[str, int], int]  # (tensor, dimension) -> the set of axes that share it
DimCell = tuple[str, int | None, str]  # what is shown, the set of axes, what a screen reader says
TensorRow = tuple[str, list[DimCell]]  # the tensors that are shaped and tied alike, their dimensions


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

    >>> page = document(Story("tiny", ("before",), (), notes=("a <b> c",)))
    >>> page.count("a &lt;b&gt; c"), "https://" in page.split("<body>")[0]
    (1, False)
    """
    return templates().get_template("page.html").render(**values(story), plotly=_plotly())


@functools.cache
def templates() -> Environment:
    """What renders the page. Text is escaped unless it is `Markup`, and a name that nobody gave is an error.

    >>> templates().from_string("<p>{{ name|dotted }}</p>").render(name="a<b.0")
    '<p>a&lt;b.<wbr>0</p>'
    """
    made = Environment(
        loader=PackageLoader("secateur.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.filters.update(amount=amount, change=change, dotted=dotted, size=size)
    made.globals.update(palette=PALETTE)
    return made


def dotted(name: str) -> Markup:
    """A name that may break into lines behind its dots.

    >>> str(dotted("layer1.0"))
    'layer1.<wbr>0'
    """
    return escape(name).replace(".", Markup(".<wbr>"))


def _plotly() -> Markup:
    """Plotly's own script, as its package brings it."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise MissingPackageError("the report needs plotly: pip install 'secateur[report]'") from error
    return Markup(get_plotlyjs())


def values(story: Story) -> dict[str, Any]:
    """All that the template reads.

    >>> values(Story("tiny", ("before",), ()))["summary"]
    '0 axes with 0 positions can be cut; none was.'
    """
    curve = sorted(story.sweep.curve, reverse=True) if story.sweep else ()
    return {
        "story": story,
        "summary": _summary(story),
        "stages": [(f.name, *(amount(value, f.unit) for value in f.values)) for f in story.figures],
        "layers": [
            (layer.module or "(top level)", f"{layer.before:,}", f"{layer.after:,}", _share(layer.after, layer.before))
            for layer in story.layers
        ],
        "curve": [(_share(left), digits(metric, 4)) for left, metric in curve],
        "map": list(_map(story)),
        "reasons": _reasons(story),
        "payload": payload(story),
    }


def size(axis: Strand) -> str:
    """How many positions an axis has, and how many are left.

    >>> size(Strand("a", 4, (0, 2), ())), size(Strand("a", 2, (0, 1), ()))
    ('4 → 2', '2, whole')
    """
    return f"{axis.size:,} → {len(axis.keep):,}" if axis.removed else f"{axis.size:,}, whole"


def _summary(story: Story) -> str:
    axes, positions = len(story.axes), sum(axis.size for axis in story.axes)
    if not story.cut:
        return f"{axes} axes with {positions:,} positions can be cut; none was."
    cut, removed = sum(axis.removed > 0 for axis in story.axes), sum(axis.removed for axis in story.axes)
    return f"{cut} of {axes} axes were cut: {removed:,} of {positions:,} positions are gone."


def _share(part: float, whole: float = 1) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _map(story: Story) -> Iterator[tuple[str, list[tuple[str, list[TensorRow]]]]]:
    """The model's sections; in them the modules, each with the tensors that have a dimension in an axis."""
    of_site = ties(story)[1]
    tied = {tensor for tensor, _ in of_site}
    held: dict[str, list[Shape]] = {}
    for shape in story.shapes:
        if shape.tensor in tied:
            held.setdefault(shape.module, []).append(shape)
    for section in sections(list(held)):
        inside = [(_inside(module, section.title), _lines(held[module], of_site)) for module in section.modules]
        yield section.title or "(top level)", inside


def _inside(module: str, section: str) -> str:
    """What a module is called within its section."""
    short = module.removeprefix(f"{section}.") if module != section else module.rpartition(".")[2]
    return short or "(top level)"


def _lines(shapes: Iterable[Shape], of_site: Ties) -> list[TensorRow]:
    """One line for all tensors of a module that are shaped and tied alike."""
    alike: dict[object, list[Shape]] = {}
    for shape in shapes:
        sites = tuple(of_site.get((shape.tensor, d)) for d in range(len(shape.before)))
        alike.setdefault((shape.before, shape.after, sites), []).append(shape)
    return [
        (
            ", ".join(shape.tensor.rpartition(".")[2] for shape in same),
            [_dim(same, d, of_site) for d in range(len(same[0].before))],
        )
        for same in alike.values()
    ]


def _dim(same: list[Shape], dim: int, of_site: Ties) -> DimCell:
    before, after = same[0].before[dim], same[0].after[dim]
    sites = ", ".join(str(Site(shape.tensor, dim)) for shape in same)
    text = f"{before}→{after}" if before != after else str(before)
    return text, of_site.get((same[0].tensor, dim)), f"{before} before, {after} after: {sites}"


def _reasons(story: Story) -> list[tuple[str, list[str]]]:
    """Why dimensions could not be cut, most frequent first, with where that is."""
    reasons: dict[str, list[str]] = {}
    for blocked in story.blocked:
        reasons.setdefault(blocked.reason, []).append(f"{blocked.tensor}[{blocked.dim}]")
    return sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
