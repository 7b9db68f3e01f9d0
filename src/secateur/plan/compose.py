"""Two cuts, one after the other, as one."""

from __future__ import annotations

from dataclasses import replace

from secateur.errors import PlanError
from secateur.plan.plan import Change, Kept, Plan


def compose(first: Plan, second: Plan) -> Plan:
    """The plan that does at once what the first and then, on what it made, the second does."""
    kept = dict(first.kept)
    for name, dims in second.kept.items():
        kept[name] = _compose_dims(name, first.kept.get(name, {}), dims)
    held = dict(first.held)
    for place, dims in second.held:
        held[place] = _compose_dims(str(place), held.get(place, {}), dims)
    attributes = {place: (was, value) for place, was, value in first.attributes}
    for place, was, value in second.attributes:
        attributes[place] = (attributes.get(place, (was, was))[0], value)
    axes = {axis.name: axis for axis in first.axes}
    for axis in second.axes:
        before = axes.get(axis.name)
        if before is not None and len(before.keep) == axis.size:
            axis = replace(axis, size=before.size, keep=tuple(before.keep[i] for i in axis.keep))
        axes[axis.name] = axis
    return Plan(
        axes=tuple(axes.values()),
        kept=kept,
        shapes={**second.shapes, **first.shapes},
        attributes=tuple((place, was, value) for place, (was, value) in attributes.items()),
        held=tuple(held.items()),
        macs=Change(first.macs.before, second.macs.after),
        params=Change(first.params.before, second.params.after),
        bytes=Change(first.bytes.before, second.bytes.after),
        example=second.example,
    )


def _compose_dims(name: str, first: Kept, second: Kept) -> Kept:
    dims = dict(first)
    for dim, index in second.items():
        if dim in first:
            if index and index[-1] >= len(first[dim]):
                raise PlanError(f"the second plan keeps position {index[-1]} of {name}, of which the first left fewer")
            index = tuple(first[dim][i] for i in index)
        dims[dim] = index
    return dims
