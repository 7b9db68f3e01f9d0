"""The plan: which positions of which axes stay. A value: it can be printed, compared, saved and sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.axes import Atom, free_atoms, keep_mask
from secateur.importance import Context, Magnitude
from secateur.plan.counts import settle
from secateur.plan.targets import Ratio
from secateur.trace.graph import Axis, Graph
from secateur.trace.sizes import Place

Importance = Callable[[Context], Tensor]


@dataclass(frozen=True)
class AxisPlan:
    """What stays of one axis."""

    name: str
    size: int
    keep: tuple[int, ...]
    exact: bool


@dataclass(frozen=True)
class Plan:
    """Which positions stay, tensor by tensor, and which attributes must say so."""

    axes: tuple[AxisPlan, ...]
    kept: Mapping[str, Mapping[int, tuple[int, ...]]]
    shapes: Mapping[str, tuple[int, ...]]
    attributes: tuple[tuple[Place, int, int], ...]
    held: tuple[tuple[Place, Mapping[int, tuple[int, ...]]], ...] = ()  # tensors in plain attributes
    example: Any = field(default=None, repr=False, compare=False)

    def every_kept(self) -> dict[str, Mapping[int, tuple[int, ...]]]:
        """What stays of each tensor, those in plain attributes too."""
        return {**self.kept, **{str(place): dims for place, dims in self.held}}

    @property
    def keep(self) -> dict[str, dict[int, Tensor]]:
        """{tensor name: {dim: sorted int64 tensor of kept indices}}, only dims that change."""
        return {name: {d: torch.tensor(k) for d, k in dims.items()} for name, dims in self.kept.items()}


def plan(
    graph: Graph,
    target: Ratio,
    *,
    importance: Importance | None = None,
    exact: bool = False,
    protect: Sequence[str] = (),
    round_to: int = 1,
) -> Plan:
    """Decide which positions stay."""
    importance = importance or Magnitude()
    chosen = [axis for axis in graph.axes if axis.exact or not exact]
    wanted = {axis.atom: axis.size - target.removed(axis.name, axis.size) for axis in chosen}
    counts = settle(graph.sizes, wanted)
    parameters = dict(graph.model.named_parameters(remove_duplicate=False))
    masks: dict[Atom, np.ndarray] = {}
    axes = []
    for axis in chosen:
        count = counts.get(axis.atom, axis.size)
        if count == axis.size:
            continue
        scores = importance(Context(axis, parameters, graph.layouts))
        best = torch.topk(scores, count).indices.sort().values.numpy()
        mask = np.zeros(axis.size, np.bool_)
        mask[best] = True
        masks[axis.atom] = mask
        axes.append(AxisPlan(axis.name, axis.size, tuple(best.tolist()), axis.exact))
    kept: dict[str, dict[int, tuple[int, ...]]] = {}
    shapes = {}
    for name, dims in graph.layouts.items():
        for i, layout in enumerate(dims):
            if any(atom in masks for atom in free_atoms(layout)):
                kept.setdefault(name, {})[i] = tuple(np.flatnonzero(keep_mask(layout, masks)).tolist())
                shapes[name] = tuple(d.size for d in dims)
    final = {atom: int(mask.sum()) for atom, mask in masks.items()}
    attributes = tuple(
        (place, graph.sizes.held(place, {}), value) for place, value in graph.sizes.changed_places(final).items()
    )
    held = tuple((graph.places[name], kept.pop(name)) for name in list(kept) if graph.kinds[name] == "attribute")
    shapes = {name: shape for name, shape in shapes.items() if name in kept}
    return Plan(tuple(axes), kept, shapes, attributes, held, graph.example)


__all__ = ["Axis", "AxisPlan", "Plan", "plan"]
