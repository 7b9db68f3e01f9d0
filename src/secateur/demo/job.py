"""Train, cut, recover, and measure at each stage."""

import contextlib
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.compensate import LeastSquares
from secateur.demo.data import Pictures, digits, fashion_mnist
from secateur.demo.nets import ResidualNet, RowLSTM
from secateur.importance import Reconstruction
from secateur.io import save
from secateur.pipeline.apply import apply
from secateur.pipeline.sweep import SweepResult, sweep
from secateur.planning import Macs, Plan, plan
from secateur.progress import progress
from secateur.tracing import Graph, macs, trace

DATA: dict[str, Callable[[int], Pictures]] = {"digits": digits, "fashion-mnist": fashion_mnist}
STAGES = ("before", "after the cut", "after recovery")
_RATE = 0.01
_BATCH = 64  # of training
_SEEN = 1024  # images that compensation calibrates on
_TIMED = 128  # batch size when latency is measured
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
class DemoOutcome:
    """What became of one network."""

    name: str
    stages: tuple[Stage, ...]
    plan: Plan = field(repr=False)
    graph: Graph = field(repr=False)  # of the network before the cut
    sweep: SweepResult = field(repr=False)
    model: nn.Module = field(repr=False)


def run(seed: int = 0, data: str = "digits", *, quick: bool = False) -> tuple[DemoOutcome, ...]:
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
        (x, y), (u, v) = pictures.train, pictures.test
        pictures = Pictures((x[:256], y[:256]), (u[:128], v[:128]))
    with deterministic(seed):
        nets = {"residual net": ResidualNet(), "LSTM": RowLSTM(pictures.size)}
        return tuple(_outcome(name, net, pictures, effort, seed) for name, net in nets.items())


def trained(seed: int = 0, epochs: int = 4) -> tuple[nn.Module, Pictures]:
    """A small residual network, trained on handwritten digits, and the digits; the same for the same seed.

    >>> model, data = trained(epochs=2)
    >>> accuracy(model, data.test) > 0.3
    True
    """
    pictures = digits(seed)
    with deterministic(seed):
        net = ResidualNet()
        train(net, pictures.train, epochs, _RATE, seed, "training on digits")
    return net, pictures


def _outcome(name: str, net: nn.Module, pictures: Pictures, effort: Effort, seed: int) -> DemoOutcome:
    more = 3 if isinstance(net, RowLSTM) else 1  # a recurrent net learns slower, and each pass is quicker
    train(net, pictures.train, effort.epochs * more, _RATE, seed, f"training the {name}")
    example = pictures.test[0][:1]
    original = copy.deepcopy(net)
    graph = trace(original, example)
    curve = sweep(original, example, lambda model: accuracy(model, pictures.test), ratios=(0.15, 0.3, 0.45, 0.6, 0.75))
    batches = pictures.train[0][:_SEEN].split(_TIMED)
    decided = plan(graph, Macs(0.5), importance=Reconstruction(batches))
    small = copy.deepcopy(apply(net, decided, compensate=LeastSquares(batches)))
    train(net, pictures.train, effort.recovery * more, _RATE / 10, seed + 1, f"letting the {name} recover")
    models = (original, small, net)
    times = _latencies(models, pictures.test[0][:_TIMED], effort.turns)
    stages = tuple(
        _stage(stage, model, pictures, example, seconds)
        for stage, model, seconds in zip(STAGES, models, times, strict=True)
    )
    return DemoOutcome(name, stages, decided, graph, replace(curve, metric="accuracy"), net)


def _stage(name: str, model: nn.Module, pictures: Pictures, example: Tensor, seconds: float) -> Stage:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        save(model, file)
        length = file.stat().st_size
    params = sum(parameter.numel() for parameter in model.parameters())
    return Stage(name, accuracy(model, pictures.test), params, macs(model, example), length, seconds)


def train(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, rate: float, seed: int, what: str) -> None:
    """Train in place, with AdamW and a one-cycle learning rate; the same for the same seed."""
    pictures, labels = data
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    per_epoch = -(-len(labels) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * per_epoch)
    model.train()
    for _ in progress(range(epochs), what):
        for batch in torch.randperm(len(labels), generator=generator).split(_BATCH):
            loss = F.cross_entropy(model(pictures[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """The fraction of images that are classified correctly."""
    model.eval()
    pictures, labels = data
    right = sum(
        int((model(p).argmax(1) == y).sum()) for p, y in zip(pictures.split(500), labels.split(500), strict=True)
    )
    return right / len(labels)


@torch.no_grad()
def _latencies(models: Sequence[nn.Module], batch: Tensor, turns: int) -> list[float]:
    """Seconds per run of each model, measured in turns: what slows the machine for a while slows all."""
    from torch.utils.benchmark import Timer  # looks for compilers, which takes seconds

    timers = [
        Timer("model(batch)", globals={"model": model, "batch": batch}, num_threads=1, timer=time.thread_time)
        for model in models
    ]
    samples = [[timer.timeit(_RUNS).median for timer in timers] for _ in range(turns)]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


@contextlib.contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """One thread, and a seed that leaves the caller's random state alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
