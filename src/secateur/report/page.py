"""The sections of the report as HTML: all of its text, readable without a script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from secateur.report.blocks import blocks
from secateur.report.markup import Markup, dotted, joined, tag
from secateur.report.numbers import amount, change, digits
from secateur.report.payload import ties
from secateur.report.story import Figure, Shape, Story, Strand
from secateur.trace.graph import Site


def body(story: Story) -> Markup:
    """Everything between the header and the scripts.

    >>> body(Story("tiny", ("before",), (), notes=("a <b> c",))).count("a &lt;b&gt; c")
    1
    """
    parts = (_headline(story), _stages(story), _layers(story), _sweep(story), _explorer(story), _blocked(story))
    return joined(_banner(story), tag("main", *parts, *_tables(story), _notes(story), id="report"))


def _section(anchor: str, title: str, lead: str, *children: str) -> Markup:
    return tag("section", tag("h2", title), tag("p", lead, class_="lead"), *children, id=anchor)


def _chart(name: str, label: str) -> Markup:
    return tag("div", tag("div", class_="chart", id=f"chart-{name}", role="img", aria_label=label), class_="scroll")


def _banner(story: Story) -> Markup:
    toggle = tag("button", "Dark", id="theme", type="button", aria_pressed="false")
    removed, positions = sum(a.removed for a in story.axes), sum(a.size for a in story.axes)
    cut = sum(a.removed > 0 for a in story.axes)
    said = (
        f"{cut} of {len(story.axes)} axes were cut: {removed:,} of {positions:,} positions are gone."
        if story.cut
        else f"{len(story.axes)} axes with {positions:,} positions can be cut; none was."
    )
    top = tag("div", tag("span", "Secateur", class_="brand"), toggle, class_="bar")
    return tag("header", top, tag("h1", story.model), tag("p", said, class_="lead"))


# figures ---------------------------------------------------------------------------------------------------------


def _headline(story: Story) -> Markup:
    return tag("section", *(_tile(figure) for figure in story.figures), class_="tiles", aria_label="headline figures")


def _tile(figure: Figure) -> Markup:
    before, after = figure.values[0], figure.values[-1]
    children = [tag("h2", figure.name), tag("p", amount(after, figure.unit), class_="big")]
    if len(figure.values) > 1 and before is not None:
        moved = change(before, after, figure.unit)
        children.append(tag("p", f"from {amount(before, figure.unit)}", tag("b", moved), class_="from"))
        if after is not None and 0 <= after <= before and before:
            children.append(_meter(after / before))
    return tag("article", *children, class_="tile")


def _meter(share: float) -> Markup:
    return tag("span", tag("i", style=f"width:{100 * share:.1f}%"), class_="meter", aria_hidden="true")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: bool = False) -> Markup:
    """A table whose first column heads its rows."""
    head = tag("tr", *(tag("th", column, scope="col") for column in columns))
    lines = (tag("tr", tag("th", dotted(row[0]), scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows)
    inner = tag("table", tag("thead", head), tag("tbody", *lines), class_="numbers" if numeric else None)
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=f"table of {columns[0]}")


def _stages(story: Story) -> Markup:
    if len(story.stages) < 3:
        return Markup("")
    rows = [(f.name, *(amount(value, f.unit) for value in f.values)) for f in story.figures]
    lead = "Every figure, from the model as it was to the model as it is."
    return _section("stages", "Step by step", lead, _table(("figure", *story.stages), rows, numeric=True))


def _layers(story: Story) -> Markup:
    if not story.layers:
        return Markup("")
    rows = [
        (layer.module or "(top level)", f"{layer.before:,}", f"{layer.after:,}", _share(layer.after, layer.before))
        for layer in story.layers
    ]
    table = _table(("layer", "MACs before", "MACs after", "left"), rows, numeric=True)
    return _section(
        "layers",
        "Where the work is",
        "Multiply-accumulates of one run on the example, in the order in which the layers run.",
        tag("div", id="layers-level", class_="choice", role="group", aria_label="how fine"),
        _chart("layers", "bar chart of MACs by layer, before and after"),
        tag("details", tag("summary", f"All {len(rows)} layers as a table"), table),
    )


def _share(after: int, before: int) -> str:
    return f"{100 * after / before:.1f} %" if before else "–"


def _sweep(story: Story) -> Markup:
    if story.sweep is None:
        return Markup("")
    metric, cost = story.sweep.metric, story.sweep.cost
    parts: list[str] = []
    if story.sweep.curve:
        rows = [(_percent(at), digits(value, 4)) for at, value in sorted(story.sweep.curve, reverse=True)]
        parts.append(_chart("curve", f"line chart of {metric} against the {cost} that are left"))
        parts.append(
            tag("details", tag("summary", "The curve as a table"), _table((f"{cost} left", metric), rows, numeric=True))
        )
    if story.sweep.sensitivity:
        parts.append(tag("h3", "How sensitive each axis is"))
        parts.append(_chart("sensitivity", f"bar chart of {metric} when one axis alone is cut"))
    return _section("sweep", "What a cut costs", f"{metric} as more of the model is removed.", *parts)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# axes ------------------------------------------------------------------------------------------------------------


def _explorer(story: Story) -> Markup:
    if not story.axes:
        return Markup("")
    search = tag("input", id="filter", type="search", placeholder="Filter axes", aria_label="filter axes")
    options = (_option(i, axis) for i, axis in enumerate(story.axes))
    chooser = tag("div", search, tag("ul", *options, id="axes-list", role="listbox", aria_label="axes"), class_="side")
    order = tag("div", id="axis-order", class_="choice", role="group", aria_label="order of positions")
    detail = tag(
        "div",
        tag("h3", id="axis-name"),
        tag("p", id="axis-facts", aria_live="polite"),
        order,
        _chart("axis", "bar chart of the score of each position, kept and removed"),
        tag("details", tag("summary", "Removed positions"), tag("p", id="axis-removed", class_="mono")),
        class_="panel",
    )
    matrix = joined(
        tag("h3", "What is tied to what"),
        tag(
            "p",
            "A row is an axis, a column a module, first to last. Where they meet, the axis runs through it.",
        ),
        _chart("ties", "matrix of axes and the modules that they run through"),
    )
    main = tag("div", detail, matrix, _map(story), class_="main")
    lead = (
        "An axis is one thing that can be cut, with all the slices that must follow. Point at one, or move to it with "
        "the arrow keys, to see every place where it runs."
    )
    return _section("axes", "Axes", lead, tag("div", chooser, main, class_="explorer"))


def _option(i: int, axis: Strand) -> Markup:
    kind = Markup("") if axis.exact else tag("span", "inexact", class_="kind", title=axis.why)
    size = f"{axis.size:,} → {len(axis.keep):,}" if axis.removed else f"{axis.size:,}, whole"
    return tag(
        "li",
        tag("span", dotted(axis.name), class_="name"),
        tag("span", size, kind, class_="size"),
        _meter(len(axis.keep) / axis.size),
        role="option",
        id=f"axis-{i}",
        data_axis=i,
        tabindex=-1,
        aria_selected="false",
    )


def _map(story: Story) -> Markup:
    """The model's blocks; every dimension that an axis runs through is a button."""
    of_site = ties(story)[1]
    tied = {tensor for tensor, _ in of_site}
    held: dict[str, list[Shape]] = {}
    for shape in story.shapes:
        if shape.tensor in tied:
            held.setdefault(shape.module, []).append(shape)
    cards = (
        tag(
            "article",
            tag("h4", dotted(block.title or "(top level)")),
            *(_module(module, block.title, held[module], of_site) for module in block.modules),
            class_="block",
        )
        for block in blocks(list(held))
    )
    hint = "Each box is a block. Numbers are sizes, before → after; those with a frame belong to an axis."
    return joined(tag("p", hint), tag("div", *cards, id="map", role="group", aria_label="blocks of the model"))


def _module(module: str, block: str, shapes: list[Shape], of_site: Mapping[tuple[str, int], int]) -> Markup:
    """One line for all tensors of a module that are shaped and tied alike."""
    short = module.removeprefix(f"{block}.") if module != block else module.rpartition(".")[2]
    alike: dict[object, list[Shape]] = {}
    for shape in shapes:
        sites = tuple(of_site.get((shape.tensor, d)) for d in range(len(shape.before)))
        alike.setdefault((shape.before, shape.after, sites), []).append(shape)
    rows = (
        tag(
            "div",
            tag("span", ", ".join(shape.tensor.rpartition(".")[2] for shape in same), class_="tensor"),
            tag("span", *(_dim(same, d, of_site) for d in range(len(same[0].before))), class_="dims"),
            class_="row",
        )
        for same in alike.values()
    )
    return tag("div", tag("h5", dotted(short or "(top level)")), *rows, class_="module")


def _dim(same: Sequence[Shape], dim: int, of_site: Mapping[tuple[str, int], int]) -> Markup:
    before, after = same[0].before[dim], same[0].after[dim]
    text = f"{before}→{after}" if before != after else str(before)
    tie = of_site.get((same[0].tensor, dim))
    if tie is None:
        return tag("span", text, class_="dim")
    sites = ", ".join(str(Site(shape.tensor, dim)) for shape in same)
    label = f"{before} before, {after} after: {sites}"
    return tag("button", text, type="button", class_="dim tied", data_tie=tie, tabindex=-1, aria_label=label)


# what is left ----------------------------------------------------------------------------------------------------


def _blocked(story: Story) -> Markup:
    if not story.blocked:
        return Markup("")
    reasons: dict[str, list[str]] = {}
    for blocked in story.blocked:
        reasons.setdefault(blocked.reason, []).append(f"{blocked.tensor}[{blocked.dim}]")
    groups = (
        tag(
            "details",
            tag("summary", tag("b", f"{len(places):,}"), tag("span", reason)),
            tag("ul", *(tag("li", dotted(place)) for place in places), class_="places mono"),
            class_="reason",
        )
        for reason, places in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    )
    lead = f"{len(story.blocked):,} dimensions stay as they are. Open a reason to see where."
    return _section("blocked", "What could not be cut, and why", lead, *groups)


def _tables(story: Story) -> list[Markup]:
    return [tag("section", tag("h2", table.title), _table(table.columns, table.rows)) for table in story.tables]


def _notes(story: Story) -> Markup:
    if not story.notes:
        return Markup("")
    return tag("section", tag("h2", "Notes"), *(tag("p", note) for note in story.notes), id="notes")
