"""The best that can be done without training, in one call."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from secateur.calibrate.data import Some, taken
from secateur.compensate import LeastSquares, Outcome
from secateur.distributed import alone, meet, together
from secateur.importance import Importance, Reconstruction
from secateur.importance.batches import check_values
from secateur.pipeline.apply import agree_on, apply, outcome
from secateur.pipeline.bases import Bases
from secateur.planning import Plan, plan
from secateur.planning.plans import Change
from secateur.planning.targets import Target
from secateur.state.held import named_tensors
from secateur.state.transaction import Transaction, transaction
from secateur.timing import Timing, latency
from secateur.timing.target import check_measured
from secateur.tracing import Graph, macs, trace, unwrap

_RANKED = 16  # batches that tell which positions go: fewer than it takes to fit the rest
_TURNED = 4  # batches that tell the basis of an axis: a small matrix
_FASTER = 1.05  # below this, the difference is noise


@dataclass(frozen=True)
class Compressed:
    """What `compress` chose, what it cost before and after, and what it did to each layer.

    >>> import secateur as sec, torch
    >>> net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> print(sec.compress(net, torch.zeros(1, 8), sec.Macs(0.5), [torch.randn(64, 8)], timed=False))
    axis ...
    counted: ...
    """

    plan: Plan
    compensation: Outcome
    macs: Change  # counted in a run of each model
    params: Change
    latency: tuple[Timing, Timing] | None  # measured before and after
    why: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        lines = [str(self.plan), str(self.compensation), *self.why]
        lines += [f"counted:   MACs {self.macs}, params {self.params}"]
        if self.latency is not None:
            before, after = (timing.median for timing in self.latency)
            lines.append(f"measured:  {before * 1e3:.2f} ms → {after * 1e3:.2f} ms ({_speed(before / after)})")
        return "\n".join([*lines, f"took {self.seconds:.1f} s"])


def compress(
    model: nn.Module,
    example: Any,
    target: Target,
    batches: Any,
    *,
    importance: Importance | None = None,
    exact: bool = False,
    protect: Sequence[str] = (),
    round_to: int = 1,
    ridge: float = 1e-3,
    bias: bool = False,
    loadable: bool = False,
    verify: bool = True,
    timed: bool = True,
) -> Compressed:
    """Cut a model to a target and keep as much of what it does as possible, without training; in place.

    >>> import secateur as sec, torch
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> batches = [torch.randn(64, 8) for _ in range(4)]
    >>> report = sec.compress(net, batches[0], sec.Macs(0.5), batches)
    >>> report.macs.after <= 0.5 * report.macs.before, report.compensation.after < report.compensation.before
    (True, True)

    `batches` are inputs as the model will see them, the more the better: an iterable of examples, or a function that
    makes one. Of an endless iterable, give a part: `sec.Data(batches, tokens=100_000)`. What the example does not have,
    such as the labels of a DataLoader, is left out. Axes that only linear maps touch (`rotations`) are rotated, so that
    less is lost; not for another criterion. Positions are ranked by what the output would lose when they go and the
    others are refitted (`Reconstruction`), the target is spent where that costs least, the cut is verified, and each
    layer is refitted to what it put out before (`LeastSquares`). The keywords are those of `plan`, `LeastSquares`
    and `apply`; `bias=True` gives layers without a bias one where that helps; `timed=False` skips measuring time.
    All or nothing: whatever goes wrong, the model is as it was. In a process group every rank calls this with its own
    batches, and all come to the model that a single process makes of all batches.
    """
    start = time.perf_counter()
    with together("compress"), taken(batches, "compress", example) as data:  # that of all ranks
        inner = unwrap(model)
        check_values(inner, inner.parameters(), "compress")
        check_measured(target)
        graph = trace(inner, example)
        options: dict[str, Any] = {"exact": exact, "protect": protect, "round_to": round_to, "loadable": loadable}
        made, criterion, bases = _planned(graph, target, importance, data, options)
        before = Counted(graph.macs(), params(inner), latency(inner, example) if timed else None)
        agree_on("compress", made)
        with transaction(inner) as undo:
            turned = bases.rotate({axis.name for axis in made.axes}, undo)
            reached = _cut(inner, made, LeastSquares(data, ridge=ridge, bias=bias), verify, undo)
            after = Counted(macs(inner, example), params(inner), latency(inner, example) if timed else None)
            report = compressed(made, reached, before, after, criterion, start, turned)
            meet("compress: done")  # on every rank, or on none
    return report


def ranking(data: Sequence[Any]) -> Importance:
    """The criterion that goes with a refit."""
    return Reconstruction(Some(data, _RANKED))


class Counted(NamedTuple):
    """What a model costs."""

    macs: int
    params: int
    time: Timing | None = None


def compressed(
    made: Plan,
    reached: Outcome,
    before: Counted,
    after: Counted,
    criterion: Importance,
    start: float,
    turned: Sequence[str] = (),
) -> Compressed:
    """What came of it; `start` is when it began, `turned` are the axes that were rotated."""
    return Compressed(
        plan=made,
        compensation=reached,
        macs=Change(before.macs, after.macs),
        params=Change(before.params, after.params),
        latency=None if before.time is None or after.time is None else (before.time, after.time),
        why=_why(made, criterion, turned),
        seconds=time.perf_counter() - start,
    )


def _planned(
    graph: Graph, target: Target, importance: Importance | None, data: Sequence[Any], options: dict[str, Any]
) -> tuple[Plan, Importance, Bases]:
    """What to cut, by which criterion and in which bases; the model is as it was."""
    if importance is not None:  # it has data of its own
        return plan(graph, target, importance=importance, **options), importance, Bases.of(graph, ())
    criterion = ranking(data)
    with alone(), Bases.of(graph, Some(data, _TURNED)).tried() as bases:
        return plan(graph, target, importance=criterion, **options), criterion, bases


def _cut(model: nn.Module, made: Plan, recipe: LeastSquares, verify: bool, undo: Transaction) -> Outcome:
    """Cut and refit a model with data that is here as a whole already."""
    undo.keep(*(tensor for name, tensor in named_tensors(model) if name not in made.kept))  # refitted as they are
    with alone():
        apply(model, made, verify=verify, compensate=recipe)
    reached = outcome(model)
    assert reached is not None
    return reached


def _speed(times: float) -> str:
    if times >= _FASTER:
        return f"{times:.2f}x faster"
    change = "no faster" if times > 1 / _FASTER else f"{1 / times:.2f}x slower"
    return f"{change}: what takes the time on this machine is not what was cut; Latency(f) as the target cuts that"


def params(model: nn.Module) -> int:
    """How many numbers a model has to learn."""
    return sum(parameter.numel() for parameter in model.parameters())


def _why(made: Plan, criterion: Importance, turned: Sequence[str]) -> tuple[str, ...]:
    """The choice in words: what went most and what stayed."""
    name = type(criterion).__name__ if not callable(getattr(criterion, "__name__", None)) else criterion.__name__
    cut = sorted(made.axes, key=lambda axis: len(axis.keep) / axis.size)
    if not cut:
        return (f"ranked by {name}: nothing had to be cut",)
    most = ", ".join(f"{axis.name} ({axis.size} → {len(axis.keep)})" for axis in cut[:3])
    chosen = f"ranked by {name}; {len(cut)} axes are cut, where that loses least for what it saves; most of all {most}"
    rotated = f"only linear maps touch {len(turned)} of them, such as {turned[0]}: rotated first" if turned else ""
    return (chosen, rotated) if rotated else (chosen,)
