"""The plan: which positions of which axes stay. A value: it can be printed, compared, saved and sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.axes import Atom, Mask, free_atoms, keep_mask, size_after
from secateur.errors import PlanError
from secateur.importance import Importance, Magnitude, Scope
from secateur.plan.configs import config_fields
from secateur.plan.cost import CostModel
from secateur.plan.problem import Problem
from secateur.plan.targets import Budget, Chosen, Target, target_of
from secateur.trace.graph import Graph
from secateur.trace.sizes import Place

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
    kept: Mapping[str, Kept]
    shapes: Mapping[str, tuple[int, ...]]
    attributes: tuple[tuple[Place, int, int], ...]
    held: tuple[tuple[Place, Kept], ...] = ()  # tensors in plain attributes
    macs: Change = Change(0, 0)
    params: Change = Change(0, 0)
    bytes: Change = Change(0, 0)
    example: Any = field(default=None, repr=False, compare=False)
    confirmation: Any = field(default=None, repr=False, compare=False)  # of a measured target: asked, predicted, came

    @property
    def keep(self) -> dict[str, dict[int, Tensor]]:
        """{tensor name: {dim: sorted int64 tensor of kept indices}}, only dims that change."""
        return {name: {d: torch.tensor(k) for d, k in dims.items()} for name, dims in self.kept.items()}

    def every_kept(self) -> dict[str, Kept]:
        """What stays of each tensor, those in plain attributes too."""
        return {**self.kept, **{str(place): dims for place, dims in self.held}}

    def to_json(self) -> str:
        """The plan as text, the same on every machine."""
        from secateur.plan.json import dumps

        return dumps(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote; anything else is refused."""
        from secateur.plan.json import loads

        return loads(text)

    def then(self, second: Plan) -> Plan:
        """This plan and, on the model that it makes, a second one, as a single plan."""
        from secateur.plan.compose import compose

        return compose(self, second)

    def __str__(self) -> str:
        width = max((len(axis.name) for axis in self.axes), default=4)
        lines = [f"{'axis':<{width}}  before  after  {'saves MACs':>14}  {'saves params':>12}"]
        for a in self.axes:
            mark = "" if a.exact else "  inexact"
            lines.append(f"{a.name:<{width}}  {a.size:>6}  {len(a.keep):>5}  {a.macs:>14,}  {a.params:>12,}{mark}")
        lines += [f"MACs    {self.macs}", f"params  {self.params}"]
        return "\n".join(lines if self.confirmation is None else [*lines, f"latency {self.confirmation}"])


def plan(
    graph: Graph,
    target: Target | Mapping[str, float] | tuple[Budget, ...],
    *,
    importance: Importance | None = None,
    exact: bool = False,
    protect: Sequence[str] = (),
    round_to: int = 1,
    scope: Scope | str | None = None,
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
    tuple), or `Zeros()`. `importance` scores the positions of an axis; the best
    stay. `exact=True` cuts only axes whose cut is exact; `protect` names axes, modules or parameters that stay whole,
    as globs; `round_to` keeps multiples of it, as far as an axis is that large. `scope` says among which positions
    one is ranked: those of its "axis" (a budget then cuts all axes by one ratio), "global" or "isomorphic"; where
    nothing is said, a ratio holds for each axis and a budget is spent where it costs the least importance.
    """
    if not isinstance(graph, Graph):
        raise PlanError(f"plan takes a Graph, not {type(graph).__name__}; make one with secateur.trace")
    wanted = target_of(target)
    criterion = Magnitude() if importance is None else importance
    # The problem is gone, with what it remembers, before the plan is made.
    chosen = wanted.choose(Problem(graph, criterion, exact=exact, protect=protect, round_to=round_to, scope=scope))
    return make_plan(graph, chosen)


def make_plan(graph: Graph, chosen: Chosen) -> Plan:
    """The plan that keeps the chosen positions of each axis and all of every other."""
    cost = CostModel(graph)
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
    sizes = graph.sizes
    attributes = [(place, sizes.held(place, {}), value) for place, value in sizes.changed_places(counts).items()]
    after = {name: [size_after(dim, counts) for dim in dims] for name, dims in graph.layouts.items()}
    after |= {str(place): [value] for place, _, value in attributes}
    attributes += config_fields(graph.model, after, sizes.read)
    held = tuple((graph.places[name], kept.pop(name)) for name in list(kept) if graph.kinds[name] == "attribute")
    return Plan(
        axes=tuple(axes),
        kept=kept,
        shapes={name: tuple(d.size for d in graph.layouts[name]) for name in kept},
        attributes=tuple(attributes),
        held=held,
        macs=Change(cost.macs({}), cost.macs(counts)),
        params=Change(cost.params({}), cost.params(counts)),
        bytes=Change(cost.bytes({}), cost.bytes(counts)),
        example=graph.example,
        confirmation=getattr(chosen, "confirmation", None),
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
