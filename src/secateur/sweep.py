"""How a metric falls as more is cut: axis by axis, and all together."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from secateur.apply import apply
from secateur.errors import PlanError, SecateurError
from secateur.importance import Importance, Magnitude
from secateur.plan.counts import components
from secateur.plan.plan import make_plan
from secateur.plan.problem import Problem
from secateur.progress import progress
from secateur.trace import Axis, trace
from secateur.trace.capture import arguments


class SweepError(SecateurError, ValueError):
    """A sweep was asked for with a metric or with batches that give no numbers."""


Metric = Callable[[nn.Module], float]
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True)
class Point:
    """A cut and what the metric is after it; MACs and parameters as shares of the whole."""

    ratio: float
    macs: float
    params: float
    metric: float


@dataclass(frozen=True)
class Sensitivity:
    """What cutting one axis alone does; `along` are axes that the model's arithmetic takes with it."""

    axis: str
    along: tuple[str, ...]
    point: Point | None  # None: the axis cannot be cut by itself


@dataclass(frozen=True)
class Sweep:
    """The metric of the whole model, the trade-off curve over ratios, and the sensitivity of each axis."""

    metric: str
    whole: float
    curve: tuple[Point, ...]
    axes: tuple[Sensitivity, ...]

    def to_data(self) -> dict[str, Any]:
        """The sweep as plain values, for JSON."""
        return asdict(self)


class OutputError:
    """How far a model's outputs are from those of the model as it was: the relative error, 0 when nothing changed.

    >>> net = nn.Linear(2, 2, bias=False)
    >>> metric = OutputError(net, [torch.ones(1, 2)])
    >>> net.weight.data *= 1.5
    >>> round(metric(net), 3)
    0.5
    """

    __name__ = "relative output error"

    def __init__(self, model: nn.Module, batches: Iterable[Any]) -> None:
        self._batches = list(batches)
        if not self._batches:
            raise SweepError("a sweep needs at least one batch to compare outputs on")
        self._want = [_outputs(model, batch) for batch in self._batches]

    def __call__(self, model: nn.Module) -> float:
        wrong = right = 0.0
        for batch, want in zip(self._batches, self._want, strict=True):
            for new, old in zip(_outputs(model, batch), want, strict=True):
                wrong += float((new - old).square().sum())
                right += float(old.square().sum())
        return math.sqrt(wrong / right) if right else math.sqrt(wrong)


@torch.no_grad()
def _outputs(model: nn.Module, example: Any) -> list[Tensor]:
    args, kwargs = arguments(example)
    try:
        leaves = tree_leaves(model(*args, **kwargs))
    except Exception as error:  # any code of the user's may run here
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SweepError(
            f"{type(model).__name__} could not be run on a batch: {text}. A batch is an example"
        ) from error
    return [leaf.double() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def sweep(
    model: nn.Module,
    example: Any,
    metric: Metric | None = None,
    *,
    ratios: Sequence[float] = RATIOS,
    axis_ratio: float = 0.5,
    importance: Importance | None = None,
    exact: bool = False,
    protect: Sequence[str] = (),
    round_to: int = 1,
) -> Sweep:
    """Measure what cutting does to a metric.

    >>> torch.manual_seed(0)
    <...>
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    >>> found = sweep(net, torch.ones(1, 4), ratios=(0.25, 0.5))
    >>> [(point.ratio, point.macs) for point in found.curve]
    [(0.25, 0.75), (0.5, 0.5)]
    >>> found.axes[0].axis, found.whole
    ('0 features', 0.0)

    `metric` is a function from a model to a number, such as its accuracy; without one it is how far the outputs on the
    example are from those of the uncut model. It is called on copies: the model stays as it is. Every axis is cut by
    `axis_ratio` alone, then all of them together by each of `ratios`.
    """
    if not isinstance(axis_ratio, float) or not all(0 < r < 1 for r in (*ratios, axis_ratio)):
        raise PlanError(f"the ratios of a sweep are between 0 and 1, not {(*ratios, axis_ratio)}")
    measure = OutputError(copy.deepcopy(model).eval(), [example]) if metric is None else metric
    problem = Problem(
        trace(model, example), importance or Magnitude(), exact=exact, protect=tuple(protect), round_to=round_to
    )
    name = str(getattr(measure, "__name__", type(measure).__name__))
    whole = _measured(measure, copy.deepcopy(model), name)
    cuts: list[tuple[float, tuple[Axis, ...]]] = [(ratio, problem.axes) for ratio in ratios]
    cuts += [(axis_ratio, _movable(problem, axis, axis_ratio)) for axis in problem.axes]
    points = [_point(problem, model, cut, measure, name) for cut in progress(cuts, "sweeping")]
    curve, alone = points[: len(ratios)], points[len(ratios) :]
    axes = tuple(
        Sensitivity(axis.name, tuple(other.name for other in together if other is not axis), point)
        for axis, (_, together), point in zip(problem.axes, cuts[len(ratios) :], alone, strict=True)
    )
    return Sweep(name, whole, tuple(point for point in curve if point is not None), axes)


def _movable(problem: Problem, axis: Axis, ratio: float) -> tuple[Axis, ...]:
    """The axis, if it can be cut by itself; with those that its count depends on, if only with them."""
    if problem.counts(lambda other: ratio if other is axis else 0.0)[axis] < axis.size:
        return (axis,)
    groups = [atoms for atoms, _ in components(problem.graph.sizes) if axis.atom in atoms]
    return tuple(other for other in problem.axes if any(other.atom in group for group in groups)) or (axis,)


def _point(
    problem: Problem, model: nn.Module, cut: tuple[float, tuple[Axis, ...]], metric: Metric, name: str
) -> Point | None:
    ratio, axes = cut
    plan = make_plan(problem.graph, problem.best(problem.counts(lambda axis: ratio if axis in axes else 0.0)))
    if not plan.axes:
        return None
    small = apply(copy.deepcopy(model), plan, verify=False)
    macs, params = (cost.after / max(cost.before, 1) for cost in (plan.macs, plan.params))
    return Point(ratio, macs, params, _measured(metric, small, name))


def _measured(metric: Metric, model: nn.Module, name: str) -> float:
    value = metric(model)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise SweepError(f"the metric {name} returned {str(value)[:40]!r}; return one number") from None
    if not math.isfinite(number):
        raise SweepError(f"the metric {name} returned {number}; return a finite number")
    return number
