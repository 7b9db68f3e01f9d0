"""How a metric falls as more is cut: axis by axis, and all together."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from secateur.arguments import FLAG, Rule, a_function, a_number, check, listed, optional, shown
from secateur.calibrate import call
from secateur.calibrate.blame import batch_name, studied
from secateur.calibrate.data import each
from secateur.compat import tree_leaves
from secateur.compensate import LeastSquares
from secateur.distributed import bare, in_step, is_sharded, meet, together
from secateur.errors import PlanError, SecateurError
from secateur.importance import Importance, Magnitude, Reconstruction, uses_data
from secateur.pipeline.apply import apply
from secateur.planning import Plan, Ratio
from secateur.planning.plans import make_plan
from secateur.planning.problem import Chosen, PruningProblem
from secateur.planning.targets import Target, is_measured, target_of
from secateur.progress import progress
from secateur.tracing import Axis, trace, unwrap


class SweepError(SecateurError, ValueError):
    """A sweep was asked for without targets, or with a metric or with batches that give no numbers."""


Metric = Callable[[nn.Module], float]
_RATIO = Rule("a number between 0 and 1", a_number(above=0, below=1).holds)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True)
class Point:
    """A cut and what the metric is after it; MACs and parameters as shares of the whole."""

    ratio: float | None  # None: the target is not one ratio for all
    macs: float
    params: float
    metric: float
    target: str = ""
    predicted: float = 0.0  # the importance that goes: the scores of the removed positions, added up


@dataclass(frozen=True)
class Sensitivity:
    """What cutting one axis alone does; `along` are axes that the model's arithmetic takes with it."""

    axis: str
    along: tuple[str, ...]
    point: Point | None  # None: the axis cannot be cut by itself


@dataclass(frozen=True)
class SweepResult:
    """The metric of the whole model, the trade-off curve over targets, and the sensitivity of each axis."""

    metric: str
    whole: float
    curve: tuple[Point, ...]
    axes: tuple[Sensitivity, ...]

    def to_data(self) -> dict[str, Any]:
        """The sweep as plain values, for JSON; None for a prediction that is infinite."""
        data = asdict(self)
        for point in (*data["curve"], *(one["point"] for one in data["axes"] if one["point"])):
            if math.isinf(point["predicted"]):
                point["predicted"] = None
        return data


class OutputError:
    """How far a model's outputs are from those of the model as it was: the relative error, 0 when nothing changed.

    >>> import torch
    >>> net = nn.Linear(2, 2, bias=False)
    >>> metric = OutputError(net, [torch.ones(1, 2)])
    >>> net.weight.data *= 1.5
    >>> round(metric(net), 3)
    0.5

    Models run in eval mode and are left as they were.
    """

    __name__ = "relative output error"

    def __init__(self, model: nn.Module, batches: Iterable[Any]) -> None:
        self._batches = list(batches)
        if not self._batches:
            raise SweepError("a sweep needs at least one batch to compare outputs on")
        with studied(model, "a sweep"):
            self._want = [_outputs(model, number, batch) for number, batch in enumerate(self._batches)]

    def __call__(self, model: nn.Module) -> float:
        wrong = right = 0.0
        with studied(model, "a sweep"):
            for number, (batch, want) in enumerate(zip(self._batches, self._want, strict=True)):
                for new, old in zip(_outputs(model, number, batch), want, strict=True):
                    wrong += float((new - old).square().sum())
                    right += float(old.square().sum())
        return math.sqrt(wrong / right) if right else math.sqrt(wrong)


def _outputs(model: nn.Module, number: int, batch: Any) -> list[Tensor]:
    try:
        leaves = tree_leaves(call(model, batch))
    except Exception as error:  # any code of the user's may run here
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SweepError(
            f"{type(model).__name__} could not be run on {batch_name(number)}: {text}. A batch is an example"
        ) from error
    return [leaf.double() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def sweep(
    model: nn.Module,
    example: Any,
    metric: Metric | None = None,
    *,
    targets: Sequence[Target] | None = None,
    batches: Any = None,
    ratios: Sequence[float] | None = None,
    axis_ratio: float | None = 0.5,
    importance: Importance | None = None,
    exact: bool = False,
    protect: Sequence[str] = (),
    round_to: int = 1,
) -> SweepResult:
    """Measure what cutting does to a metric.

    >>> import secateur as sec, torch
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    >>> found = sweep(net, torch.ones(1, 4), ratios=(0.25, 0.5))
    >>> [(point.ratio, point.macs) for point in found.curve]
    [(0.25, 0.75), (0.5, 0.5)]
    >>> found.axes[0].axis, found.whole
    ('0 features', 0.0)
    >>> found = sweep(net, torch.ones(1, 4), targets=[sec.Macs(0.8), sec.Macs(0.4)], batches=[torch.randn(64, 4)])
    >>> [(point.target, point.macs) for point in found.curve]
    [('Macs(0.8)', 0.75), ('Macs(0.4)', 0.375)]
    >>> found.curve[0].predicted < found.curve[1].predicted
    True

    `metric` is a function from a model to a number, such as its accuracy; without one it is how far the outputs on the
    batches, or else on the example, are from those of the uncut model. It is called on copies: the model stays as it
    is. The curve has a point for each of `targets`, or of `ratios` for all axes; then every axis is cut by `axis_ratio`
    alone (None: no axis is). All of them are planned before the first is measured, and the criterion is asked once.

    `batches` are inputs as in `compress`, and every cut is as there: ranked by `Reconstruction` unless `importance`
    says otherwise, and refitted by `LeastSquares`. The error on them is then one of data that layers were fitted to; a
    metric of your own, on other data, says more. In a process group every rank is sent the batches of all, and measures
    every cut; a model that is spread over ranks is put together on each.
    """
    wanted = _wanted(targets, ratios)
    check("sweep", PlanError, locals(), axis_ratio=optional(_RATIO), exact=FLAG)
    check("sweep", SweepError, locals(), metric=optional(a_function("a function from a model to a number")))
    inner = unwrap(model, sharded=True)
    with_data = batches is not None or (importance is not None and uses_data(importance))
    shared = with_data or is_sharded(inner) or any(map(is_measured, wanted))
    with together("sweep", all_come=shared):
        data = None if batches is None else list(each(batches, "sweep", example))
        with bare(inner, values=True):
            graph = trace(model, example)
            run = _Sweeping(model, metric or OutputError(model, [example] if data is None else data), data)
            _ = run.whole  # first of all: whether the metric can be computed
            if importance is None:
                importance = Magnitude() if data is None else Reconstruction(data)
            problem = PruningProblem(graph, importance, exact=exact, protect=protect, round_to=round_to)
            found = _swept(problem, run, wanted, axis_ratio)
        if shared:
            meet("sweep: done")  # on every rank, or on none
    return found


def _swept(problem: PruningProblem, run: "_Sweeping", wanted: Sequence[Target], ratio: float | None) -> SweepResult:
    """What comes of each target, and of each axis alone; measured by every rank for itself."""
    single = [_Alone(ratio, axis, _along(problem, axis, ratio)) for axis in problem.axes if ratio]
    cuts = [_decided(problem, target) for target in (*wanted, *single)]
    with in_step():
        points = [run.point(*cut) for cut in progress(cuts, "sweeping")]
    axes = (
        Sensitivity(one.axis.name, tuple(other.name for other in one.along), point if plan.axes else None)
        for one, (_, plan, _), point in zip(single, cuts[len(wanted) :], points[len(wanted) :], strict=True)
    )
    return SweepResult(run.name, run.whole, tuple(points[: len(wanted)]), tuple(axes))


def _wanted(targets: object, ratios: Sequence[float] | None) -> tuple[Target, ...]:
    """The targets of the curve."""
    if targets is None:
        given = RATIOS if ratios is None else listed(ratios)
        if not given or not all(map(_RATIO.holds, given)):
            raise PlanError(f"sweep: ratios are numbers between 0 and 1, at least one, not {shown(ratios)}")
        return tuple(map(Ratio, given))
    if ratios is not None:
        raise SweepError("a sweep is over targets or over ratios: give one of them; Ratio(r) is a target too")
    if isinstance(targets, str | bytes | Mapping | Tensor) or not isinstance(targets, Iterable):
        raise PlanError(f"sweep: targets is a list of targets, such as [Macs(0.8), Macs(0.6)], not {shown(targets)}")
    made = tuple(map(target_of, targets))
    if not made:
        raise SweepError("a sweep needs at least one target, such as Macs(0.5)")
    return made


@dataclass(frozen=True)
class _Alone:
    """A target: one axis by itself, with those that its count depends on."""

    ratio: float
    axis: Axis
    along: tuple[Axis, ...]

    def __str__(self) -> str:
        return str(Ratio(self.ratio))

    def choose(self, problem: PruningProblem) -> Chosen:
        return problem.best(problem.counts(lambda axis: self.ratio if axis in (self.axis, *self.along) else 0.0))


def _along(problem: PruningProblem, axis: Axis, ratio: float) -> tuple[Axis, ...]:
    """The axes that have to be cut along with one: those that its count depends on, unless it can be cut by itself."""
    if problem.counts(lambda other: ratio if other is axis else 0.0)[axis] < axis.size:
        return ()
    group = next((group for group, _, _ in problem.tied if axis in group), [])
    return tuple(other for other in problem.axes if other in group and other is not axis)


def _decided(problem: PruningProblem, target: Target) -> tuple[Target, Plan, float]:
    """A target, the plan that it comes to, and the importance that is lost."""
    chosen = target.choose(problem)
    gone = (problem.scores(axis).clamp_min(0).index_fill(0, kept, 0.0) for axis, kept in chosen.items())
    return target, make_plan(problem.graph, chosen), sum((float(scores.sum()) for scores in gone), 0.0)


class _Sweeping:
    """Cuts copies of a model and measures them."""

    def __init__(self, model: nn.Module, metric: Metric, batches: list[Any] | None) -> None:
        self._model, self._metric, self._batches = model, metric, batches
        self.name = str(getattr(metric, "__name__", type(metric).__name__))

    @cached_property
    def whole(self) -> float:
        """The metric of the uncut model."""
        return self._measured(copy.deepcopy(self._model))

    def point(self, target: Target, plan: Plan, lost: float) -> Point:
        """What comes of a cut."""
        macs, params = (cost.after / max(cost.before, 1) for cost in (plan.macs, plan.params))
        ratio = target.ratio if isinstance(target, Ratio | _Alone) else None
        metric = self.whole
        if plan.axes:
            refit = None if self._batches is None else LeastSquares(self._batches)
            metric = self._measured(apply(copy.deepcopy(self._model), plan, verify=False, compensate=refit))
        return Point(None if isinstance(ratio, Mapping) else ratio, macs, params, metric, str(target), lost)

    def _measured(self, model: nn.Module) -> float:
        value = self._metric(model)
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise SweepError(f"the metric {self.name} returned {str(value)[:40]!r}; return one number") from None
        if not math.isfinite(number):
            raise SweepError(f"the metric {self.name} returned {number}; return a finite number")
        return number
