"""Train, cut, recover, and measure at each stage."""

from __future__ import annotations

import contextlib
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from secateur.apply import apply
from secateur.compensate import LeastSquares
from secateur.demo.data import Pictures, digits, fashion_mnist
from secateur.demo.nets import ResidualNet, RowLSTM
from secateur.demo.training import accuracy, train
from secateur.importance import Reconstruction
from secateur.io import save
from secateur.plan import Macs, Plan, plan
from secateur.sweep import Sweep, sweep
from secateur.trace import Graph, macs, trace

DATA: dict[str, Callable[[int], Pictures]] = {"digits": digits, "fashion-mnist": fashion_mnist}
STAGES = ("before", "after the cut", "after recovery")
_RATE = 0.01
_SEEN = 1024  # pictures that compensation looks at
_TIMED = 128  # pictures per run when latency is measured
_RUNS = 5  # in a row, of one model


@dataclass(frozen=True)
class Effort:
    """How long to train, to recover and to measure."""

    epochs: int
    recovery: int
    turns: int


_QUICK, _SMALL, _LARGE = Effort(1, 1, 1), Effort(8, 3, 9), Effort(3, 1, 5)


@dataclass(frozen=True)
class Stage:
    """What was measured at one stage."""

    name: str
    accuracy: float
    params: int
    macs: int
    file_bytes: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of one network."""

    name: str
    stages: tuple[Stage, ...]
    plan: Plan = field(repr=False)
    graph: Graph = field(repr=False)  # of the network before the cut
    sweep: Sweep = field(repr=False)
    model: nn.Module = field(repr=False)


def run(seed: int = 0, data: str = "digits", *, quick: bool = False) -> tuple[Outcome, ...]:
    """Train a residual network and an LSTM, cut both to half of the MACs, fine-tune briefly.

    >>> outcomes = run(quick=True)
    >>> [(outcome.name, outcome.stages[1].macs <= outcome.stages[0].macs / 2) for outcome in outcomes]
    [('residual net', True), ('LSTM', True)]

    `data` is "digits", which come inside scikit-learn, or "fashion-mnist", if Debian's package is installed. All but
    the latency is the same for the same seed. `quick` trains too little to be good at anything, for tests.
    """
    pictures = DATA[data](seed)
    effort = _QUICK if quick else _SMALL if pictures.size < 28 else _LARGE
    if quick:
        pictures = pictures.some(256, 128)
    with _deterministic(seed):
        nets = {"residual net": ResidualNet(), "LSTM": RowLSTM(pictures.size)}
        return tuple(_outcome(name, net, pictures, effort, seed) for name, net in nets.items())


def _outcome(name: str, net: nn.Module, pictures: Pictures, effort: Effort, seed: int) -> Outcome:
    more = 3 if isinstance(net, RowLSTM) else 1  # a recurrent net learns slower, and each pass is quicker
    train(net, pictures.train, effort.epochs * more, _RATE, seed, f"training the {name}")
    example = pictures.test[0][:1]
    original = copy.deepcopy(net)
    graph = trace(original, example)
    curve = sweep(original, example, lambda model: accuracy(model, pictures.test), ratios=(0.15, 0.3, 0.45, 0.6, 0.75))
    decided = plan(graph, Macs(0.5), importance=Reconstruction(list(pictures.train[0][:_SEEN].split(_TIMED))))
    batches = pictures.train[0][:_SEEN].split(_TIMED)
    small = copy.deepcopy(apply(net, decided, compensate=LeastSquares(batches)))
    train(net, pictures.train, effort.recovery * more, _RATE / 10, seed + 1, f"letting the {name} recover")
    models = (original, small, net)
    times = _latencies(models, pictures.test[0][:_TIMED], effort.turns)
    stages = tuple(
        _stage(stage, model, pictures, example, seconds)
        for stage, model, seconds in zip(STAGES, models, times, strict=True)
    )
    named = Sweep("accuracy", curve.whole, curve.curve, curve.axes)
    return Outcome(name, stages, decided, graph, named, net)


def _stage(name: str, model: nn.Module, pictures: Pictures, example: Tensor, seconds: float) -> Stage:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        save(model, file)
        length = file.stat().st_size
    params = sum(parameter.numel() for parameter in model.parameters())
    return Stage(name, accuracy(model, pictures.test), params, macs(model, example), length, seconds)


@torch.no_grad()
def _latencies(models: Sequence[nn.Module], batch: Tensor, turns: int) -> list[float]:
    """Seconds per run of each model, measured in turns: what slows the machine for a while slows all."""
    timers = [
        Timer("model(batch)", globals={"model": model, "batch": batch}, num_threads=1, timer=time.thread_time)
        for model in models
    ]
    samples = [[timer.timeit(_RUNS).median for timer in timers] for _ in range(turns)]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


@contextlib.contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """One thread, and a seed that leaves the caller's random state alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
