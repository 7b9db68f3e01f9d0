"""The plan: which positions of which axes stay. A value: it can be printed, compared, saved and sent."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.arguments import FLAG, check
from secateur.axes import Atom, Mask, free_atoms, keep_mask, size_after
from secateur.distributed import bare, is_sharded, together
from secateur.errors import PlanError, SecateurWarning
from secateur.importance import Importance, Magnitude, Scope, uses_data
from secateur.planning.configs import config_fields
from secateur.planning.loadable import Loadable, named_fields
from secateur.planning.names import Named
from secateur.planning.problem import Chosen, CostModel, PruningProblem
from secateur.planning.reasons import nothing_to_cut
from secateur.planning.removal import BlockRemoval, without
from secateur.planning.targets import Budget, Budgets, Ratio, Target, is_measured, target_of
from secateur.planning.told import kept_twice, told_sizes
from secateur.state.held import Place
from secateur.tracing.graph import GRAPH, Axis, Graph
from secateur.tracing.makers import maker_of
from secateur.tracing.origins import Origin

Kept = Mapping[int, tuple[int, ...]]  # dimension -> the indices that stay, rising


@dataclass(frozen=True)
class AxisPlan:
    """What stays of one axis, and what cutting it alone would save.

    >>> AxisPlan("layer1.0.conv1 channels", size=4, keep=(0, 2), exact=True).keep
    (0, 2)
    """

    name: str
    size: int
    keep: tuple[int, ...]
    exact: bool
    macs: int = 0
    params: int = 0


@dataclass(frozen=True)
class Change:
    """A cost before and after."""

    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.before:,} → {self.after:,} ({self.after / max(self.before, 1):.1%})"


@dataclass(frozen=True)
class Plan:
    """Which positions stay, tensor by tensor, and which attributes must say so.

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> plan = sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Ratio(0.5))
    >>> sorted(plan.keep)
    ['0.bias', '0.weight', '2.weight']
    >>> sec.Plan.from_json(plan.to_json()) == plan
    True
    """

    axes: tuple[AxisPlan, ...]
    kept: Mapping[str, Kept]  # what stays of each parameter and buffer that changes: `keep`, as plain numbers
    shapes: Mapping[str, tuple[int, ...]]
    attributes: tuple[tuple[Place, Any, Any], ...]  # numbers: where, before and after
    kept_in_attributes: tuple[tuple[Place, Kept], ...] = ()  # tensors in plain attributes
    macs: Change = Change(0, 0)
    params: Change = Change(0, 0)
    bytes: Change = Change(0, 0)
    example: Any = field(default=None, repr=False, compare=False)
    others: tuple[Any, ...] = field(default=(), repr=False, compare=False)  # further examples to verify with
    confirmation: Any = field(default=None, repr=False, compare=False)  # of a measured target: asked, predicted, came
    why: str = field(default="", repr=False, compare=False)  # it is empty, or cuts less than was asked
    fields: Mapping[str, Any] = field(default_factory=dict)  # of a loadable plan: the constructor's new values
    origin: Origin | None = field(default=None, repr=False)  # how the full-size model is built, where that is known
    routers: tuple[str, ...] = ()  # weights that score experts: one without a row is never chosen
    removed: BlockRemoval = field(default_factory=BlockRemoval)  # blocks that go first; other names are those left then
    factored: tuple[str, ...] = ()  # layers that become two next; other names are those of the two

    @property
    def keep(self) -> dict[str, dict[int, Tensor]]:
        """{tensor name: {dim: sorted int64 tensor of kept indices}}, only dims that change."""
        return {name: {d: torch.tensor(k) for d, k in dims.items()} for name, dims in self.kept.items()}

    @property
    def loadable(self) -> bool:
        """Whether the constructor builds what it leaves, with `fields`."""
        return bool(self.fields) or not (self.kept or self.kept_in_attributes or self.removed or self.factored)

    def kept_everywhere(self) -> dict[str, Kept]:
        """What stays of each tensor, those in plain attributes too."""
        return {**self.kept, **{str(place): dims for place, dims in self.kept_in_attributes}}

    def to_json(self) -> str:
        """The plan as text, the same on every machine."""
        from secateur.planning.json import dumps

        return dumps(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote; anything else is refused."""
        from secateur.planning.json import loads

        return loads(text)

    def then(self, second: Plan) -> Plan:
        """This plan and, on the model that it makes, a second one, as a single plan."""
        if second.removed:
            first = replace(without(self, second.removed), removed=self.removed.then(second.removed))
            fields = {**self.fields, **second.fields} if self.loadable and second.loadable else {}
            return replace(first.then(replace(second, removed=BlockRemoval())), fields=fields)
        kept = {name: _compose(name, self.kept.get(name, {}), dims) for name, dims in second.kept.items()}
        held = dict(self.kept_in_attributes)
        for place, dims in second.kept_in_attributes:
            held[place] = _compose(str(place), held.get(place, {}), dims)
        attributes = {place: (was, value) for place, was, value in self.attributes}
        for place, was, value in second.attributes:
            attributes[place] = (attributes.get(place, (was, was))[0], value)
        axes = {axis.name: axis for axis in self.axes}
        for axis in second.axes:
            before = axes.get(axis.name)
            if before is not None and len(before.keep) == axis.size:
                axis = replace(axis, size=before.size, keep=tuple(before.keep[i] for i in axis.keep))
            axes[axis.name] = axis
        return Plan(
            axes=tuple(axes.values()),
            kept={**self.kept, **kept},
            shapes={**second.shapes, **self.shapes},
            attributes=tuple((place, was, value) for place, (was, value) in attributes.items()),
            kept_in_attributes=tuple(held.items()),
            macs=Change(self.macs.before, second.macs.after),
            params=Change(self.params.before, second.params.after),
            bytes=Change(self.bytes.before, second.bytes.after),
            example=second.example,
            others=second.others,
            why=second.why,
            fields={**self.fields, **second.fields} if self.loadable and second.loadable else {},
            origin=self.origin,
            routers=tuple(dict.fromkeys((*self.routers, *second.routers))),
            removed=self.removed,
            factored=tuple(dict.fromkeys((*self.factored, *second.factored))),
        )

    def __str__(self) -> str:
        width = max((len(axis.name) for axis in self.axes), default=4)
        lines = [f"{'axis':<{width}}  before  after  {'saves MACs':>14}  {'saves params':>12}"]
        for a in self.axes:
            mark = "" if a.exact else "  inexact"
            lines.append(f"{a.name:<{width}}  {a.size:>6}  {len(a.keep):>5}  {a.macs:>14,}  {a.params:>12,}{mark}")
        lines = lines if self.axes or not self.removed else []
        lines += [f"without {block}" for block in self.removed.blocks]
        lines += [f"{layer} as a product of two" for layer in self.factored]
        lines += [f"MACs    {self.macs}", f"params  {self.params}"]
        lines += [] if self.confirmation is None else [f"latency {self.confirmation}"]
        return "\n".join([*lines, f"why     {self.why}"] if self.why else lines)


def plan(
    graph: Graph,
    target: Target | Mapping[Any, float] | tuple[Budget, ...],
    *,
    importance: Importance | None = None,
    exact: bool = False,
    protect: Named | Sequence[Named] = (),
    round_to: int = 1,
    scope: Scope | str | None = None,
    loadable: bool = False,
) -> Plan:
    """Decide which positions stay.

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> print(sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Ratio(0.5)))
    axis        before  after      saves MACs  saves params
    0 features       8      4              24            28
    MACs    48 → 24 (50.0%)
    params  58 → 30 (51.7%)

    `target` is `Ratio(r)`, `Macs(f)`, `Params(f)`, `Bytes(f)`, `Latency(f)`, several of these budgets (`a & b`, or a
    tuple), or `Zeros()`. `importance` scores the positions of an axis; the best stay. `exact=True` cuts only axes whose
    cut is exact; `protect` is what stays whole: modules, and names of axes, modules or parameters, as globs; `round_to`
    keeps multiples of it, as far as an axis is that large. `scope` says among which positions one is ranked: those of
    its "axis" (a budget then cuts all axes by one ratio), "global" or "isomorphic"; where nothing is said, a ratio
    holds for each axis and a budget is spent where it costs the least importance. A plan that cuts nothing although
    something was asked comes with a warning; `plan.why` says it, too, and where less is cut than was asked. In a
    process group, a criterion with data sees that of all ranks, and times are those of rank 0, so each calls this and
    all get the same plan; a model that is spread over ranks is put together on each of them for that.

    `loadable=True` cuts only what the model's constructor can build with other values of its fields (`plan.fields`):
    the result is an ordinary model, which its own library loads. Layers keep equally many positions, not the same.
    """
    check("plan", PlanError, locals(), graph=GRAPH, loadable=FLAG)
    wanted = target_of(target)
    criterion = Magnitude() if importance is None else importance
    model, data = graph.model, uses_data(criterion)
    limits = Loadable(graph) if loadable else None
    runs = data or is_measured(wanted)
    whole = bare(model, values=True) if runs else nullcontext()
    with together("plan", all_come=runs or is_sharded(model)), whole:
        while True:
            graph = graph if limits is None else limits.graph
            problem = PruningProblem(graph, criterion, exact=exact, protect=protect, round_to=round_to, scope=scope)
            chosen = _chosen(problem, wanted, limits)
            del problem
            if limits is None or not limits.hold_back({axis.atom: len(kept) for axis, kept in chosen.items()}):
                break
    if limits is not None:
        chosen.why = "; ".join(filter(None, (chosen.why, limits.why())))
    if chosen.why and not chosen:
        warnings.warn(f"the plan cuts nothing: {chosen.why}", SecateurWarning, stacklevel=2)
    with bare(model):
        return make_plan(graph, chosen, limits)


def _chosen(problem: PruningProblem, target: Target, limits: Loadable | None) -> Chosen:
    """What a target decides. The problem is gone, with what it remembers, before a plan is made of it."""
    try:
        chosen = target.choose(problem)
    except PlanError as error:
        held = "" if limits is None else limits.why(all_=True)
        if not held:
            raise
        raise PlanError(f"{error}; {held}") from None
    found = chosen if isinstance(chosen, Chosen) else Chosen(chosen)
    if not found and not _asks_nothing(target):
        found.why = nothing_to_cut(problem) or found.why
    return found


def _asks_nothing(target: Target) -> bool:
    """Whether a target is met by the model as it is."""
    if isinstance(target, Ratio):
        return not any(target.ratio.values() if isinstance(target.ratio, Mapping) else [target.ratio])
    return isinstance(target, Budget | Budgets)  # one that is not met is refused


def make_plan(graph: Graph, chosen: Mapping[Axis, Tensor], limits: Loadable | None = None) -> Plan:
    """The plan that keeps the chosen positions of each axis and all of every other; `limits`: as a constructor can."""
    cost, model = CostModel.of(graph), graph.model
    maker = maker_of(model, graph.make)
    masks = {}
    axes = []
    for axis, positions in chosen.items():
        mask = np.zeros(axis.size, np.bool_)
        mask[positions.numpy()] = True
        masks[axis.atom] = mask
        saved = (cost.macs.saved(axis.atom, len(positions)), cost.params.saved(axis.atom, len(positions)))
        axes.append(AxisPlan(axis.name, axis.size, tuple(positions.tolist()), axis.exact, *saved))
    counts = {atom: int(mask.sum()) for atom, mask in masks.items()}
    kept = _kept(graph, masks)
    equations = graph.equations
    changed = {place: value for place, value in equations.changed_places(counts).items() if type(place) is Place}
    attributes = [(place, equations.held_now[place], value) for place, value in changed.items()]
    after = {name: [size_after(dim, counts) for dim in dims] for name, dims in graph.layouts.items()}
    if limits is not None:
        told = limits.told(counts)
        attributes += [(place, was, now) for place, (was, now) in told.items() if place not in changed]
    elif counts:
        attributes += config_fields(graph, model, maker, counts, changed)
        attributes += told_sizes(graph, model, after, {place for place, *_ in attributes})
        attributes += kept_twice(model, attributes)
    held = tuple((graph.places[name], kept.pop(name)) for name in list(kept) if graph.kinds[name] == "attribute")
    return Plan(
        axes=tuple(axes),
        kept=kept,
        shapes={name: tuple(d.size for d in graph.layouts[name]) for name in kept},
        attributes=tuple(attributes),
        kept_in_attributes=held,
        macs=Change(cost.macs({}), cost.macs(counts)),
        params=Change(cost.params({}), cost.params(counts)),
        bytes=Change(cost.bytes({}), cost.bytes(counts)),
        example=graph.example,
        others=graph.others,
        confirmation=chosen.confirmation if isinstance(chosen, Chosen) else None,
        why=chosen.why if isinstance(chosen, Chosen) else "",
        fields={} if limits is None else named_fields(limits.maker, limits.values(counts)),
        origin=None if maker is None else Origin.of(maker),
    )


def _kept(graph: Graph, masks: Mapping[Atom, Mask]) -> dict[str, dict[int, tuple[int, ...]]]:
    """What stays of each dimension that changes; dimensions that lie alike share one tuple, and all share numbers."""
    layouts = {id(layout): layout for dims in graph.layouts.values() for layout in dims}
    cut = {key: layout for key, layout in layouts.items() if not masks.keys().isdisjoint(free_atoms(layout))}
    numbers = tuple(range(max((layout.size for layout in cut.values()), default=0)))
    made = {key: tuple(compress(numbers, keep_mask(layout, masks).tolist())) for key, layout in cut.items()}
    kept = {
        name: {i: made[id(layout)] for i, layout in enumerate(dims) if id(layout) in cut}
        for name, dims in graph.layouts.items()
    }
    return {name: dims for name, dims in kept.items() if dims}


def _compose(name: str, first: Kept, second: Kept) -> Kept:
    """What stays of a tensor after two cuts, in its indices before the first."""
    dims = dict(first)
    for dim, index in second.items():
        if dim in first:
            if index and index[-1] >= len(first[dim]):
                raise PlanError(f"the second plan keeps position {index[-1]} of {name}, of which the first left fewer")
            index = tuple(first[dim][i] for i in index)
        dims[dim] = index
    return dims


@dataclass(frozen=True)
class AxisDifference:
    """What stays of one axis by either plan; None where a plan leaves it whole."""

    name: str
    size: int
    first: int | None
    second: int | None
    common: int  # positions that both keep


@dataclass(frozen=True)
class Difference:
    """What two plans differ in; false where that is nothing.

    >>> bool(Difference((), (), ("macs",), ()))
    True
    """

    axes: tuple[AxisDifference, ...]
    tensors: tuple[str, ...]  # whose kept positions differ
    costs: tuple[str, ...]
    attributes: tuple[tuple[str, int | None, int | None], ...]

    def __bool__(self) -> bool:
        return bool(self.axes or self.tensors or self.costs or self.attributes)

    def to_data(self) -> dict[str, Any]:
        """The difference as plain values, for JSON."""
        return asdict(self)


def difference(first: Plan, second: Plan) -> Difference:
    """Compare two plans.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> half, quarter = sec.plan(graph, sec.Ratio(0.5)), sec.plan(graph, sec.Ratio(0.75))
    >>> difference(half, quarter).axes
    (AxisDifference(name='0 features', size=8, first=4, second=2, common=2),)
    >>> bool(difference(half, half))
    False
    """
    ours, theirs = first.kept_everywhere(), second.kept_everywhere()
    return Difference(
        axes=_differing_axes(first, second),
        tensors=tuple(name for name in _names(ours, theirs) if ours.get(name) != theirs.get(name)),
        costs=tuple(cost for cost in ("macs", "params", "bytes") if getattr(first, cost) != getattr(second, cost)),
        attributes=_differing_attributes(first, second),
    )


def _names(*mappings: Any) -> list[str]:
    """The keys of all mappings, each once, in order."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _differing_axes(first: Plan, second: Plan) -> tuple[AxisDifference, ...]:
    ours = {(axis.name, axis.size): axis for axis in first.axes}
    theirs = {(axis.name, axis.size): axis for axis in second.axes}
    found = []
    for name, size in dict.fromkeys((*ours, *theirs)):
        a, b = (axes.get((name, size)) for axes in (ours, theirs))
        if a is None or b is None or a.keep != b.keep:
            kept = [set(range(size) if axis is None else axis.keep) for axis in (a, b)]
            left, right = (None if axis is None else len(axis.keep) for axis in (a, b))
            found.append(AxisDifference(name, size, left, right, len(kept[0] & kept[1])))
    return tuple(found)


def _differing_attributes(first: Plan, second: Plan) -> tuple[tuple[str, int | None, int | None], ...]:
    ours, theirs = ({str(place): value for place, _, value in plan.attributes} for plan in (first, second))
    pairs = ((name, ours.get(name), theirs.get(name)) for name in _names(ours, theirs))
    return tuple(pair for pair in pairs if pair[1] != pair[2])
