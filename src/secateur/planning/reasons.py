"""Why a plan is empty, or cuts less than was asked."""

from collections import Counter
from collections.abc import Mapping, Sequence

from secateur.planning.allocation import AxisCounts
from secateur.planning.problem import PruningProblem
from secateur.tracing.graph import Axis, Graph

_SOME = 3  # that are named


def some(parts: Sequence[str]) -> str:
    """The first of several parts of a sentence.

    >>> some(["one", "two", "three", "four", "five"])
    'one; two; three; and 2 more'
    """
    more = [f"and {len(parts) - _SOME} more"] if len(parts) > _SOME else []
    return "; ".join([*parts[:_SOME], *more])


def nothing_to_cut(problem: PruningProblem) -> str:
    """Why there is no axis to cut; empty if there is."""
    graph = problem.graph
    if not graph.axes:
        return blocked(graph)
    if not problem.axes:
        return f"none of the {len(graph.axes)} axes may be cut: {some(problem.held_back)}"
    return ""


def blocked(graph: Graph, model: str = "") -> str:
    """Why nothing in a model can be cut; it is called by its class, where it has no other name."""
    reasons = Counter(item.reason for item in graph.blocked)
    said = some([f"{count} × {reason}" for reason, count in reasons.most_common()])
    return f"nothing in {model or graph.source.name} can be cut: {said or 'no parameter has more than one position'}"


def kept_more(problem: PruningProblem, ratios: Mapping[Axis, float], counts: AxisCounts) -> str:
    """Which axes a ratio does not cut, or less than it says, and why; empty if there are none."""
    found = []
    for axis, ratio in ratios.items():
        wanted = int(axis.size * ratio + 1e-9)
        if ratio and axis not in counts:
            found.append(f"{axis.name} is protected, or not exact")
        elif ratio and (not wanted or counts[axis] > max(1, axis.size - wanted)):
            found.append(
                f"{axis.name} keeps {counts[axis]} of {axis.size}, {_because(problem, axis, wanted, counts[axis])}"
            )
    return some(found)


def _because(problem: PruningProblem, axis: Axis, wanted: int, kept: int) -> str:
    if axis.size == 1:
        return "one position must stay"
    if not wanted:
        return "as the ratio of them is less than one position"
    rounded = -(-(axis.size - wanted) // problem.round_to) * problem.round_to
    if kept == min(rounded, axis.size):
        return f"as round_to={problem.round_to} wants"
    return "as other sizes of the model depend on it (graph.constraints)"


__all__ = ["blocked", "kept_more", "nothing_to_cut", "some"]
