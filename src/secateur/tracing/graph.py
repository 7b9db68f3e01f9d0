"""What can be cut in a model: the result of `trace`."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
from torch import nn

from secateur.arguments import an_instance
from secateur.axes import Atom, Layout, Polynomial, atoms, fix, free_atoms, inherent, owned, resolve, why_fixed
from secateur.sizes.size import Dim, places
from secateur.state.held import Place, read
from secateur.tracing.capture import Capture
from secateur.tracing.equations import Constraint, Equations
from secateur.tracing.followers import tie_followers
from secateur.tracing.naming import hint_attention, name_axes
from secateur.tracing.source import Source
from secateur.tracing.stated import Stated, stated_sizes
from secateur.tracing.steps import TimedOp
from secateur.tracing.tracer import OpCost, Use
from secateur.tracing.unreached import protect
from secateur.tracing.variants import Unseen


@dataclass(frozen=True)
class Site:
    """A dimension of a tensor that an axis is part of.

    >>> str(Site("conv1.weight", 0))
    'conv1.weight[0]'
    """

    tensor: str
    dim: int

    def __str__(self) -> str:
        return f"{self.tensor}[{self.dim}]"


@dataclass(frozen=True)
class Axis:
    """One thing that can be cut: `size` positions, each with its slice of every site.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    >>> axis = sec.trace(net, torch.zeros(1, 4)).axes[0]
    >>> axis.name, axis.size, len(axis.sites), axis.exact
    ('0 features', 8, 5, False)

    `why` says what makes cutting it inexact.
    """

    name: str
    size: int
    sites: tuple[Site, ...]
    exact: bool
    why: str
    atom: Atom = field(repr=False, compare=False)

    def __hash__(self) -> int:
        return hash(self.name)  # looked up often, and there may be hundreds of sites


@dataclass(frozen=True)
class Blocked:
    """A dimension of a tensor that cannot be cut, and the reason.

    >>> import secateur as sec, torch
    >>> sec.trace(torch.nn.Linear(4, 8), torch.zeros(1, 4)).blocked[0]
    Blocked(tensor='weight', dim=0, reason="a dimension of the model's output")
    """

    tensor: str
    dim: int
    reason: str


@dataclass(frozen=True, eq=False)
class Graph:
    """What can be cut in a model, what is tied, and what is blocked and why.

    >>> import secateur as sec, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> [(axis.name, axis.size) for axis in graph.axes]
    [('0 features', 8)]
    >>> [str(site) for site in graph.axes[0].sites]
    ['0.weight[0]', '0.bias[0]', '2.weight[1]']
    """

    axes: tuple[Axis, ...]
    blocked: tuple[Blocked, ...]
    unknown: Mapping[str, int]
    ops: int
    source: Source = field(repr=False)
    example: Any = field(repr=False)
    layouts: Mapping[str, tuple[Layout, ...]] = field(repr=False)
    kinds: Mapping[str, str] = field(repr=False)
    places: Mapping[str, Place] = field(repr=False)
    equations: Equations = field(repr=False)
    costs: tuple[OpCost, ...] = field(repr=False)
    uses: tuple[Use, ...] = field(repr=False)
    steps: tuple[TimedOp, ...] = field(repr=False)  # of the run in eval mode
    own_dims: tuple[tuple[str, tuple[Layout, ...]], ...] = field(
        repr=False
    )  # as tensors had them at first, in each run
    unseen: tuple[Unseen, ...] = ()  # what no run showed
    others: tuple[Any, ...] = field(default=(), repr=False)  # further examples, that of other sizes included
    make: Any = field(default=None, repr=False)  # how the model is built, if the user says
    stated: tuple[Stated, ...] = field(default=(), repr=False)  # sizes in attributes that no run read

    @property
    def model(self) -> nn.Module:
        """The model, for its weights; refused with a `PlanError` if it has changed since it was traced."""
        return self.source.model

    @property
    def constraints(self) -> list[Constraint]:
        """What the counts of axes must satisfy beyond each axis's own size."""
        return self.equations.constraints

    def macs(self, counts: Mapping[Atom, int] | None = None) -> int:
        """Multiply-accumulates of one run on the example, when each axis keeps `counts`."""
        return Polynomial([(1, cost.layouts) for cost in self.costs])(counts or {})

    def touched(self) -> float:
        """The share of the parameters that some axis touches."""
        sizes = {name: math.prod(self.source.tensors[name].shape) for name in self.source.parameters}
        part = sum(size for name, size in sizes.items() if any(map(free_atoms, self.layouts[name])))
        return part / max(sum(sizes.values()), 1)

    def __str__(self) -> str:
        lines = [f"{len(self.axes)} axes can be cut; they touch {self.touched():.1%} of the parameters"]
        for axis in self.axes:
            kind = "exact" if axis.exact else f"inexact: {axis.why}"
            lines.append(f"  {axis.name:<40} {axis.size:>6}  {len(axis.sites):>3} sites  {kind}")
        reasons = Counter(blocked.reason for blocked in self.blocked)
        if reasons:
            lines.append(f"{len(self.blocked)} dimensions cannot")
            lines += [f"  {count:>4} × {reason}" for reason, count in reasons.most_common()]
        if self.unseen:
            lines += ["no run showed", *(f"  {unseen}" for unseen in self.unseen)]
        return "\n".join(lines)


GRAPH = an_instance(Graph, "a Graph, which secateur.trace(model, example) makes")


def _keep_tables(capture: Capture) -> None:
    """Fix the part of a table that was not looked up, which a longer input would need.

    No product sums over it, and only buffers have it, or one parameter where no data met it.
    """
    weighty = _among(dim for cost in capture.tracer.costs for dim in cost.layouts)
    met = _among(dim for use in capture.tracer.uses for dims in use.made for dim in dims)
    holders: dict[Atom, list[str]] = {}
    for name, value in capture.values.items():
        for atom in _among(value.dims) - weighty:
            holders.setdefault(atom, []).append(name)
    for atom, names in holders.items():
        parameters = [name for name in names if capture.kinds[name] == "parameter"]
        if not parameters and any(capture.kinds[name] == "buffer" for name in names):
            fix(atom, "only in buffers: cutting it saves nothing, and another input may need it")
        elif len(parameters) == 1 and atom not in met:
            fix(atom, f"only in {parameters[0]}, and no data meets it: another input may need it")


def _among(layouts: Iterable[Layout]) -> set[Atom]:
    """The atoms that may be cut; of layouts that come again and again, each is looked at once."""
    return {atom for layout in {id(layout): layout for layout in layouts}.values() for atom in free_atoms(layout)}


def _keep_given(capture: Capture) -> None:
    """Fix tensors in plain attributes that the model does not make itself: what it is given is its input."""
    for name in capture.places.keys() - capture.rewritten:
        for dim in capture.values[name].dims:
            fix(dim, f"{name} is neither a parameter nor a buffer, but something that the model is given")


def _keep_computed(stated: Sequence[Stated], own_dims: Mapping[str, tuple[Layout, ...]]) -> None:
    """Fix what has the size of an attribute that code which no run reached computes with."""
    for one in (one for one in stated if one.computed):
        why = f"code that no run reached computes with it ({one.computed})"
        remedy = "give an example that runs it (secateur.Examples), or let it ask a tensor"
        if one.shared:
            why, remedy = f"code reads it from the class ({one.computed})", "hold it in the model itself"
        for dim in (dim for name in one.tensors for dim in own_dims[name] if dim.size == one.value):
            fix(dim, f"{one.place} is its size, and {why}; {remedy}")


def build(model: nn.Module, examples: Sequence[Any], capture: Capture, unseen: Sequence[Unseen] = ()) -> Graph:
    """Solve the sizes, find the sites of every free axis, name them."""
    tie_followers(model, capture)
    protect(model, capture)
    _keep_given(capture)
    _keep_tables(capture)
    own_dims = {name: value.dims for name, value in capture.values.items()}
    read_by_runs = (*capture.tracer.sizes.exprs(), *capture.tracer.sizes.leaks)
    stated = tuple(stated_sizes(model, own_dims, {place for expr in read_by_runs for place in places(expr)}))
    _keep_computed(stated, own_dims)
    first_sites = cache(partial(_first_sites, own_dims))
    equations = Equations.of(capture.tracer, lambda place: int(read(model, place)), first_sites)
    hint_attention(equations.definitions, capture.tracer.uses)
    layouts = {name: tuple(resolve(dim) for dim in value.dims) for name, value in capture.values.items()}
    held = {atom for expr in equations.definitions.values() if isinstance(expr, Dim) for atom in atoms(expr.layout)}
    sites: dict[Atom, list[Site]] = {}
    blocked = []
    for name, dims in layouts.items():
        for i, layout in enumerate(dims):
            free = free_atoms(layout)
            if capture.kinds[name] == "attribute":
                continue
            for atom in free:
                sites.setdefault(atom, []).append(Site(name, i))
            if inherent(layout):
                continue
            if not free and layout.size > 1:
                blocked.append(Blocked(name, i, why_fixed(layout)))
            elif why := _stuck(layout, held):
                blocked.append(Blocked(name, i, why))
    names = name_axes({atom: tuple((s.tensor, s.dim) for s in found) for atom, found in sites.items()}, layouts)
    axes = tuple(
        Axis(names[atom], atom.size, tuple(found), not atom.notes, "; ".join(atom.notes), atom)
        for atom, found in sites.items()
    )
    return Graph(
        axes=axes,
        blocked=tuple(blocked),
        unknown=dict(capture.tracer.unknown),
        ops=capture.tracer.ops,
        source=Source.of(model, equations.held_now),
        example=examples[0],
        others=tuple(examples[1:]),
        layouts=layouts,
        kinds=dict(capture.kinds),
        places=dict(capture.places),
        equations=equations,
        costs=tuple(capture.tracer.costs),
        uses=tuple(capture.tracer.uses),
        steps=tuple(capture.tracer.steps),
        own_dims=(*own_dims.items(), *capture.joined),
        unseen=tuple(unseen),
        stated=stated,
    )


def _first_sites(tensors: Mapping[str, tuple[Layout, ...]]) -> dict[Atom, str]:
    """The first dimension of a tensor that each axis is part of, to name it by before it has a name."""
    found: dict[Atom, str] = {}
    for name, dims in tensors.items():
        for i, dim in enumerate(dims):
            for atom in atoms(dim):
                if atom not in found:
                    found[atom] = str(Site(name, i))
    return found


def _stuck(layout: Layout, held: Collection[Atom]) -> str:
    """What of a layout that can be cut no axis can take away, and why: some positions, or a factor that is `held`.

    Empty if there is nothing. A factor that no attribute holds, as the places of a flattened image, is nobody's to cut.
    """
    if isinstance(layout, Atom) or not any(atom.fixed for atom in atoms(layout)):
        return ""
    found = owned(layout)
    stuck = np.ones(layout.size, np.bool_)
    for atom, where, _ in found:
        if atom.fixed is None:
            stuck[where] = False
    if stuck.any():
        reasons = (why_fixed(atom) for atom, where, _ in found if atom.fixed is not None and stuck[where].any())
        return f"{stuck.sum()} of its {layout.size} positions: {next(reasons, '')}"
    factors = (atom for atom, _, _ in found if atom.fixed is not None and atom in held)
    return next((f"a factor of {atom.size} in its {layout.size}: {atom.fixed}" for atom in factors), "")
