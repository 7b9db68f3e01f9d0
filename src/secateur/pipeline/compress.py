"""The best that can be done without training, in one call."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

from torch import nn

from secateur.arguments import FLAG, NAMES, Rule, an_int, check, listed
from secateur.calibrate.data import Some, dealt, is_dealt, taken
from secateur.compensate import LeastSquares, Outcome
from secateur.compensate.moments import held_back
from secateur.compensate.recipes import JOINT
from secateur.distributed import in_step, meet, of_first, together
from secateur.errors import PlanError
from secateur.importance import Importance, Reconstruction
from secateur.pipeline.apply import agree_on, apply, outcome, remember
from secateur.pipeline.bases import TURNED, Bases
from secateur.pipeline.depth import blocks as residual_blocks
from secateur.pipeline.depth import further_off, outputs_of, plan_depth
from secateur.pipeline.factor import idle, layers_named, rank_axes, split
from secateur.pipeline.rotations import Places
from secateur.pipeline.sharded import Shard, sharded_anew, unwrapped
from secateur.planning import Bytes, Macs, Params, Plan, plan
from secateur.planning.plans import Change
from secateur.planning.targets import Budget, Budgets, Target, is_measured, target_of
from secateur.state.held import named_tensors
from secateur.state.transaction import Transaction, transaction
from secateur.timing import Timing, latency
from secateur.tracing import Graph, macs, trace

_BLOCKS = Rule(
    'how many blocks go, several such numbers to try, or "auto"',
    lambda blocks: blocks == "auto" if isinstance(blocks, str) else _are_counts(listed(blocks)),
)
_RULES = {"blocks": _BLOCKS, "rank": NAMES, "joint": JOINT}
_RULES |= dict.fromkeys(("exact", "bias", "loadable", "verify", "timed"), FLAG)
_RANKED = 16  # batches that tell which positions go: fewer than it takes to fit the rest
_JUDGES = 4  # batches that tell how many blocks should go

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
            speed = _speed(before / after, asked=self.plan.confirmation is not None)
            lines.append(f"measured:  {before * 1e3:.2f} ms → {after * 1e3:.2f} ms ({speed})")
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
    blocks: int | Sequence[int] | str = 0,
    rank: str | Sequence[str] = (),
    joint: int = 0,
    shard: Shard | None = None,
) -> Compressed:
    """Cut a model to a target and keep as much of what it does as possible, without training; in place.

    >>> import secateur as sec, torch
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> batches = [torch.randn(64, 8) for _ in range(4)]
    >>> report = sec.compress(net, batches[0], sec.Macs(0.5), batches)
    >>> report.macs.after <= 0.5 * report.macs.before, report.compensation.after < report.compensation.before
    (True, True)

    `batches` are inputs as the model will see them, an iterable of examples, or a function that makes one. Of an
    endless one, give a part: `sec.Data(batches, tokens=100_000)`. What the example does not have, such as the labels of
    a DataLoader, is left out. Axes that only linear maps touch (`rotations`) are rotated first; not for another
    criterion. Positions are ranked by what the output would lose when they go and the others are refitted
    (`Reconstruction`), the target is spent where that costs least, the cut is verified, and each layer is refitted to
    what it put out before (`LeastSquares`). The keywords are those of `plan`, `LeastSquares` and `apply`. `bias=True`
    gives layers without a bias one where that helps; `timed=False` measures no time. `blocks=2` first removes the two
    blocks that matter least (`plan_depth`) and refits the others, then cuts widths for what is left of the target; of
    several numbers, `blocks=(0, 2, 4)`, the one stays whose outputs are nearest to those of the uncut model on batches
    that were held back; `blocks="auto"` tries 0, then an eighth more of them each time, until that is worse. `rank`
    names layers that may become products of two (`factor`); where the target takes too little of it to pay, they stay
    as they are. `joint=120` then fits the layers of each block together, in so many steps (`LeastSquares`). All or
    nothing: whatever goes wrong, the model is as it was. In a process group every rank has its own batches, and all
    come to the model of one process with all; a model that is spread over ranks takes `shard`, as `apply` does.
    """
    start = time.perf_counter()
    check("compress", PlanError, locals(), **_RULES)
    rank = rank if isinstance(rank, str) else listed(rank)
    read = taken if blocks or rank or joint else dealt  # what needs the data of all ranks, else each rank its own
    with together("compress"):
        inner, target = unwrapped(model, shard, "compress"), target_of(target)
        with read(batches, "compress", example) as data, sharded_anew(inner, shard), transaction(inner) as undo:
            numbers = _numbers(blocks, traced := trace(inner, example))
            options: dict[str, Any] = {"exact": exact, "protect": protect, "round_to": round_to, "loadable": loadable}
            recipe = LeastSquares(data, ridge=ridge, bias=bias, joint=joint)
            layers = _to_split(inner, rank, whole=loadable or importance is not None)
            job = _Job(inner, traced, target, data, importance, options, recipe, verify, timed, layers)
            report = _best(job, numbers, undo, start, until_worse=blocks == "auto")
            meet("compress: done")  # on every rank, or on none
    return report


@dataclass(frozen=True)
class _Job:
    """What `compress` was asked for."""

    model: nn.Module
    graph: Graph
    target: Target
    data: Sequence[Any]
    importance: Importance | None
    options: dict[str, Any]
    recipe: LeastSquares
    verify: bool
    timed: bool
    rank: tuple[str, ...]  # layers that may become two

    def counted(self, macs: int) -> Counted:
        """What the model costs now."""
        return Counted(macs, params(self.model), self.time() if self.timed else None)

    def seconds(self) -> float:
        """What the model takes now, if that is what the target is about."""
        return self.time().median if is_measured(self.target) else 1.0

    def time(self) -> Timing:
        """What rank 0 measures."""
        told = of_first("compress: time", lambda: json.dumps(asdict(latency(self.model, self.graph.example))))
        return Timing(**json.loads(told))


def _numbers(blocks: object, graph: Graph) -> tuple[int, ...]:
    """The numbers of blocks to try."""
    if blocks == "auto":
        free = sum(block.free for block in residual_blocks(graph))
        return tuple(range(0, free, max(1, round(free / 8)))) or (0,)
    return listed(blocks)


def _are_counts(numbers: Sequence[object]) -> bool:
    return bool(numbers) and all(map(an_int(0).holds, numbers))


def _to_split(model: nn.Module, rank: str | Sequence[str], *, whole: bool) -> tuple[str, ...]:
    """The layers that may become two; `whole`: none can."""
    if rank and whole:
        raise PlanError("rank= goes neither with loadable=True nor with importance=; see secateur.factor")
    return layers_named(model, rank) if rank else ()


def _best(
    job: _Job, numbers: Sequence[int], undo: Transaction, start: float, *, until_worse: bool = False
) -> Compressed:
    """The model compressed with the best of some numbers of blocks that go; `until_worse`: the first ones of them."""
    model, before = job.model, job.counted(job.graph.macs())
    if any(numbers) or job.rank:
        undo.keep_all()
    if len(numbers) == 1:
        return _compressed(job, numbers[0], before, undo, start)
    judges = [job.data[n] for n in (sorted(held_back(len(job.data))) or range(len(job.data)))[:_JUDGES]]
    want, lost = outputs_of(model, judges), dict[int, float]()
    for number in dict.fromkeys(numbers):
        _compressed(job, number, before, undo, start)
        lost[number] = further_off(model, judges, want)
        undo.roll_back()
        if until_worse and lost[number] > min(lost.values()):
            break
    report = _compressed(job, min(lost, key=lambda number: lost[number]), before, undo, start)
    tried = ", ".join(f"{off:.4g} without {number} blocks" for number, off in lost.items())
    return replace(report, why=(*report.why, f"on data that was held back the outputs are off by {tried}"))


def _compressed(job: _Job, number: int, before: Counted, undo: Transaction, start: float) -> Compressed:
    """A model without so many blocks, cut to what is left of the target, and refitted."""
    graph, target, first = job.graph, job.target, Plan((), {}, {}, ())
    model, example = job.model, graph.example
    if number:
        with in_step():
            kept = {name: job.options[name] for name in ("protect", "loadable")}
            first = plan_depth(graph, number, Some(job.data, _RANKED), **kept)
            whole = job.seconds()
            apply(model, first, verify=job.verify, compensate=job.recipe)
            left = job.seconds()
        graph, target = trace(model, example), rest_of(target, first, whole / left)
    layers = tuple(name for name in map(first.removed.after, job.rank) if name is not None)
    split_first, made, criterion, bases = _with_ranks(job, graph, target, layers)
    agree_on("compress", made)
    turned = bases.rotate({axis.name for axis in made.axes}, undo)
    reached = _cut(model, made, job.recipe, job.verify, undo)
    made = reduce(Plan.then, [*(step for step in (first, split_first) if step.removed or step.factored), made])
    return compressed(made, reached, before, job.counted(macs(model, example)), criterion, start, turned)


def _with_ranks(job: _Job, graph: Graph, target: Target, layers: Sequence[str]) -> tuple[Plan, Plan, Importance, Bases]:
    """What becomes two of some layers, where that pays, and what to cut then."""
    model, example = job.model, graph.example
    while layers:
        moment, whole = Transaction(model), job.seconds()
        first = split(model, layers)
        two = trace(model, example)
        rank_axes(two, layers)
        first = replace(first, macs=Change(graph.macs(), two.macs()))
        found = _planned(two, rest_of(target, first, whole / job.seconds()), None, job.data, job.options)
        spare = idle(model, layers, found[0])
        if not spare:
            remember(model, first)
            return first, *found
        moment.roll_back()  # of these nothing but the way they are built has changed
        layers = [name for name in layers if name not in spare]
    return Plan((), {}, {}, ()), *_planned(graph, target, job.importance, job.data, job.options)


def rest_of(target: Target, first: Plan, rate: float) -> Target:
    """What is left of a target when a plan has been carried out, which made the model so many times as fast.

    >>> halved = Plan((), {}, {}, (), macs=Change(100, 50), params=Change(100, 80))
    >>> from secateur.planning import Macs, Params
    >>> rest_of(Macs(0.4) & Params(0.4), halved, 1.0)
    Macs(0.8) & Params(0.5)
    """
    if isinstance(target, Budgets):
        return Budgets.of(*(rest_of(each, first, rate) for each in target.parts))
    if not isinstance(target, Budget) or target.absolute:
        return target
    saved: dict[type, Change] = {Macs: first.macs, Params: first.params, Bytes: first.bytes}
    change = saved.get(type(target))
    times = rate if change is None else change.before / max(change.after, 1)
    return target.at(target.share(1.0) * times)


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
    turned: Sequence[Places] = (),
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
    with _by_itself(data), Bases.of(graph, Some(data, TURNED)).tried() as bases:
        return plan(graph, target, importance=criterion, **options), criterion, bases


def _cut(model: nn.Module, made: Plan, recipe: LeastSquares, verify: bool, undo: Transaction) -> Outcome:
    """Cut and refit a model."""
    undo.keep(*(tensor for name, tensor in named_tensors(model) if name not in made.kept))  # refitted as they are
    with _by_itself(recipe.batches):
        apply(model, made, verify=verify, compensate=recipe)
    reached = outcome(model)
    assert reached is not None
    return reached


def _by_itself(data: Sequence[Any]) -> AbstractContextManager[None]:
    """Inside, ranks that have the data of all work each by itself; those that have a part of it do not."""
    return nullcontext() if is_dealt(data) else in_step()


def _speed(times: float, *, asked: bool) -> str:
    """The change of the time in words; `asked`: it is what the target was about."""
    if times >= _FASTER:
        return f"{times:.2f}x faster"
    change = "no faster" if times > 1 / _FASTER else f"{1 / times:.2f}x slower"
    if asked:
        return f"{change}: time was asked for; other work on this machine may have disturbed the measurements"
    return f"{change}: what takes the time on this machine is not what was cut; Latency(f) as the target cuts that"


def params(model: nn.Module) -> int:
    """How many numbers a model has to learn."""
    return sum(parameter.numel() for parameter in model.parameters())


def _why(made: Plan, criterion: Importance, turned: Sequence[Places]) -> tuple[str, ...]:
    """The choice in words: what went most and what stayed."""
    name = type(criterion).__name__ if not callable(getattr(criterion, "__name__", None)) else criterion.__name__
    cut = sorted(made.axes, key=lambda axis: len(axis.keep) / axis.size)
    if not cut:
        return (f"ranked by {name}: nothing had to be cut",)
    most = ", ".join(f"{axis.name} ({axis.size} → {len(axis.keep)})" for axis in cut[:3])
    chosen = f"ranked by {name}; {len(cut)} axes are cut, where that loses least for what it saves; most of all {most}"
    if not turned:
        return (chosen,)
    rotated = f"only linear maps touch {len(turned)} of them, such as {turned[0].axis.name}: rotated first"
    if any(fold.norm is not None for own in turned for fold in own.folds):
        rotated += "; batch norms there take the statistics of rotated channels in training mode"
    return chosen, rotated
