"""Everything that a report shows, as a value: nothing in it refers to the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from secateur.axes import Atom, Layout, Polynomial, size_after
from secateur.errors import SecateurError
from secateur.importance import Importance
from secateur.planning import Plan
from secateur.planning.problem import CostModel, PruningProblem
from secateur.tracing.graph import Axis, Blocked, Graph, Site
from secateur.tracing.variants import Unseen

Scores = Mapping[str, Sequence[float]]  # axis -> a score per position


class ReportError(SecateurError):
    """A story contradicts itself or its model, so no report can be made of it."""


@dataclass(frozen=True)
class Figure:
    """A headline figure: one value per stage of the story, None where it was not measured.

    >>> Figure("accuracy", (0.93, 0.91), "%").values
    (0.93, 0.91)

    `unit` is "" for counts, "B" for bytes, "s" for seconds, "%" for fractions that are shown as a percentage; any
    other is written behind the number as it is.
    """

    name: str
    values: tuple[float | None, ...]
    unit: str = ""


@dataclass(frozen=True)
class LayerCost:
    """The multiply-accumulates of one module before and after.

    >>> LayerCost("conv1", 1000, 500).after
    500
    """

    module: str
    before: int
    after: int


@dataclass(frozen=True)
class Strand:
    """One axis as a report shows it: what stayed, what that saves, where it runs.

    >>> Strand("0 features", 4, keep=(0, 2), sites=(Site("0.weight", 0),)).removed
    2
    """

    name: str
    size: int
    keep: tuple[int, ...]
    sites: tuple[Site, ...] = field(repr=False)
    exact: bool = True
    why: str = ""
    macs: int = 0
    params: int = 0
    scores: tuple[float, ...] | None = field(default=None, repr=False)

    @property
    def removed(self) -> int:
        """How many positions are gone."""
        return self.size - len(self.keep)

    def __post_init__(self) -> None:
        if list(self.keep) != sorted(set(self.keep)) or not all(0 <= i < self.size for i in self.keep):
            raise ReportError(f"{self.name}: kept positions are rising and below {self.size}, not {self.keep[:8]}")
        if self.scores is None:
            return
        if len(self.scores) != self.size:
            raise ReportError(f"{self.name} has {self.size} positions but {len(self.scores)} scores; give one for each")
        if any(math.isnan(score) or score == -math.inf for score in self.scores):
            raise ReportError(f"{self.name}: a score is NaN or minus infinity; scores are numbers, or inf for 'never'")


@dataclass(frozen=True)
class Shape:
    """A tensor of the model: its sizes before and after.

    >>> Shape("conv1.weight", (64, 3, 7, 7), (32, 3, 7, 7)).module
    'conv1'
    """

    tensor: str
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def module(self) -> str:
        """The module that holds the tensor; "" for the model itself."""
        return self.tensor.rpartition(".")[0]


@dataclass(frozen=True)
class Sweep:
    """What a metric does as more is cut.

    >>> Sweep("accuracy", curve=((1.0, 0.93), (0.5, 0.91))).curve[-1]
    (0.5, 0.91)

    `curve` has points (share of the cost that is left, metric), `sensitivity` an axis and the metric when only that
    axis is cut, `whole` is the metric of the model as it was.
    """

    metric: str
    curve: tuple[tuple[float, float], ...] = ()
    sensitivity: tuple[tuple[str, float], ...] = ()
    whole: float | None = None
    cost: str = "MACs"

    def __post_init__(self) -> None:
        numbers = [n for point in self.curve for n in point] + [value for _, value in self.sensitivity]
        if not all(math.isfinite(n) for n in numbers):
            raise ReportError(f"the sweep of {self.metric} has a value that is not a finite number; leave it out")


@dataclass(frozen=True)
class Table:
    """Rows of text under a title, for anything that has no chart.

    >>> Table("compensation", ("layer", "error"), (("conv2", "0.01"),)).rows[0]
    ('conv2', '0.01')
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ReportError(f"table {self.title!r}: row {row} does not have the {len(self.columns)} columns")


@dataclass(frozen=True)
class Story:
    """What happened to a model: all that a report shows.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> story = Story.of(graph, sec.plan(graph, sec.Ratio(0.5)), model="tiny")
    >>> [(figure.name, figure.values) for figure in story.figures]
    [('MACs', (48, 24)), ('parameters', (58, 30)), ('weights', (232, 120))]
    >>> story.layers[0]
    LayerCost(module='0', before=32, after=16)
    """

    model: str
    stages: tuple[str, ...]
    figures: tuple[Figure, ...]
    layers: tuple[LayerCost, ...] = field(default=(), repr=False)
    axes: tuple[Strand, ...] = field(default=(), repr=False)
    shapes: tuple[Shape, ...] = field(default=(), repr=False)
    blocked: tuple[Blocked, ...] = field(default=(), repr=False)
    unseen: tuple[Unseen, ...] = field(default=(), repr=False)
    sweep: Sweep | None = None
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for figure in self.figures:
            if len(figure.values) != len(self.stages):
                raise ReportError(
                    f"{figure.name} has {len(figure.values)} values for {len(self.stages)} stages "
                    f"({', '.join(self.stages)}); give one for each, None where there is none"
                )

    @property
    def cut(self) -> bool:
        """Whether anything was removed."""
        return any(axis.removed for axis in self.axes)

    @staticmethod
    def of(
        graph: Graph,
        plan: Plan | None = None,
        *,
        model: str = "",
        scores: Scores | None = None,
        stages: Sequence[str] = ("before", "after"),
        figures: Iterable[Figure] = (),
        sweep: Sweep | None = None,
        tables: Iterable[Table] = (),
        notes: Iterable[str] = (),
    ) -> Story:
        """The story of a plan: MACs, parameters and bytes come from the graph, everything measured from you.

        The first stage is the model before the cut, all others are after it. A figure of yours replaces the one of
        the same name. `scores` are what `scores_of` gives. Without a plan it is the story of the model as it is.
        """
        stages = tuple(stages) if plan is not None else tuple(stages)[:1]
        kept = _kept(graph, plan)
        counts = {axis.atom: len(keep) for axis, keep in kept.items()}
        return Story(
            model=model or graph.source.name,
            stages=stages,
            figures=_figures(graph, counts, len(stages), figures),
            layers=_layers(graph, counts),
            axes=_strands(graph, kept, scores or {}),
            shapes=tuple(
                Shape(name, tuple(d.size for d in dims), tuple(size_after(d, counts) for d in dims))
                for name, dims in graph.layouts.items()
                if graph.kinds[name] != "attribute"
            ),
            blocked=graph.blocked,
            unseen=graph.unseen,
            sweep=sweep,
            tables=tuple(tables),
            notes=tuple(notes),
        )


def scores_of(graph: Graph, importance: Importance) -> dict[str, tuple[float, ...]]:
    """What a criterion gives to each position of each axis; to be asked before the model is cut.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 1, bias=False))
    >>> net[0].weight.data[:, 0], net[2].weight.data[0] = torch.arange(3.0), torch.zeros(3)
    >>> scores_of(sec.trace(net, torch.zeros(1, 1)), sec.Magnitude())
    {'0 features': (0.0, 1.0, 2.0)}
    """
    if (found := graph.source.difference()) is not None:
        raise ReportError(f"{found}: scores are those of the model before the cut, so call scores_of before apply")
    problem = PruningProblem(graph, importance, exact=False, protect=(), round_to=1)
    return {axis.name: tuple(problem.scores(axis).tolist()) for axis in graph.axes}


def _kept(graph: Graph, plan: Plan | None) -> dict[Axis, tuple[int, ...]]:
    """The positions that stay of each axis that the plan cuts."""
    of_name = {axis.name: axis for axis in graph.axes}
    kept = {}
    for cut in plan.axes if plan is not None else ():
        axis = of_name.get(cut.name)
        if axis is None or axis.size != cut.size:
            found = "there is none" if axis is None else f"there it has {axis.size}"
            raise ReportError(
                f"the plan cuts {cut.name} with {cut.size} positions; in the graph {found}. Give the graph that the "
                "plan was made from"
            )
        kept[axis] = cut.keep
    return kept


def _figures(graph: Graph, counts: Mapping[Atom, int], stages: int, given: Iterable[Figure]) -> tuple[Figure, ...]:
    cost = CostModel.of(graph)
    costs = (("MACs", cost.macs, ""), ("parameters", cost.params, ""), ("weights", cost.bytes, "B"))
    known = (Figure(name, (of({}), *[of(counts)] * (stages - 1)), unit) for name, of, unit in costs)
    return tuple({figure.name: figure for figure in (*known, *given)}.values())


def _layers(graph: Graph, counts: Mapping[Atom, int]) -> tuple[LayerCost, ...]:
    """MACs by module, in the order in which they first run."""
    spent: dict[str, list[tuple[int, Sequence[Layout]]]] = {}
    for cost in graph.costs:
        spent.setdefault(cost.module, []).append((1, cost.layouts))
    macs = {module: Polynomial(terms) for module, terms in spent.items()}
    return tuple(LayerCost(module, of({}), of(counts)) for module, of in macs.items())


def _strands(graph: Graph, kept: Mapping[Axis, tuple[int, ...]], scores: Scores) -> tuple[Strand, ...]:
    unknown = set(scores) - {axis.name for axis in graph.axes}
    if unknown:
        raise ReportError(f"there are scores for {min(unknown)!r}, which is no axis of the graph")
    cost = CostModel.of(graph)
    strands = []
    for axis in graph.axes:
        keep = kept.get(axis, tuple(range(axis.size)))
        saved = (cost.macs.saved(axis.atom, len(keep)), cost.params.saved(axis.atom, len(keep)))
        given = tuple(map(float, scores[axis.name])) if axis.name in scores else None
        strands.append(Strand(axis.name, axis.size, keep, axis.sites, axis.exact, axis.why, *saved, given))
    return tuple(strands)
