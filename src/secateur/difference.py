"""What two plans differ in."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from secateur.plan.plan import Plan


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
    ours, theirs = first.every_kept(), second.every_kept()
    return Difference(
        axes=_axes(first, second),
        tensors=tuple(name for name in _names(ours, theirs) if ours.get(name) != theirs.get(name)),
        costs=tuple(cost for cost in ("macs", "params", "bytes") if getattr(first, cost) != getattr(second, cost)),
        attributes=_attributes(first, second),
    )


def _names(*mappings: Any) -> list[str]:
    """The keys of all mappings, each once, in order."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _axes(first: Plan, second: Plan) -> tuple[AxisDifference, ...]:
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


def _attributes(first: Plan, second: Plan) -> tuple[tuple[str, int | None, int | None], ...]:
    ours, theirs = ({str(place): value for place, _, value in plan.attributes} for plan in (first, second))
    pairs = ((name, ours.get(name), theirs.get(name)) for name in _names(ours, theirs))
    return tuple(pair for pair in pairs if pair[1] != pair[2])
