"""How long models take on the machine at hand: one alone, or two in turns."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from secateur.arguments import a_number, check
from secateur.errors import PlanError, TraceError
from secateur.state.transaction import untouched
from secateur.tracing import check_run, unwrap
from secateur.tracing.examples import arguments

TimedRun = Callable[[], Any]

_SECONDS = a_number(least=0)

_SHORTEST = 1e-3  # seconds: a sample of less is mostly the clock's own noise
_FEWEST, _MOST = 8, 200  # samples; an even number of turns is fair to both


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: the median and the distance between the quartiles of so many samples.

    >>> print(Timing(0.0123, 0.0014, samples=50, threads=1))
    12.3 ms (quartiles 1.4 ms apart, 50 samples, 1 thread)
    """

    median: float
    iqr: float
    samples: int
    threads: int

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{_text(self.median)} (quartiles {_text(self.iqr)} apart, {self.samples} samples, {threads})"


def _text(seconds: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "µs"))
    return f"{seconds / scale:.3g} {unit}"


@dataclass(frozen=True)
class Comparison:
    """Two models that ran in turns; `ratio` is the median over the turns of the second's time by the first's.

    >>> one = Timing(0.010, 0.001, samples=50, threads=1)
    >>> print(Comparison(one, Timing(0.006, 0.001, samples=50, threads=1), 0.6))
    10 ms → 6 ms (60.0%)
    """

    before: Timing
    after: Timing
    ratio: float

    def __str__(self) -> str:
        return f"{_text(self.before.median)} → {_text(self.after.median)} ({self.ratio:.1%})"


def latency(model: nn.Module, example: Any, *, seconds: float = 1.0) -> Timing:
    """Measure how long one run of a model on the example takes.

    >>> import secateur as sec
    >>> timing = latency(nn.Linear(64, 64), torch.zeros(1, 64), seconds=0.01)
    >>> 0 < timing.median < 1
    True

    The model runs in eval mode, without gradients, with the present thread count, for about `seconds`; then it is as
    it was.
    """
    check("latency", PlanError, locals(), seconds=_SECONDS)
    with _ready(model, example) as run:
        return _timing(_in_turns((run,), seconds)[0])


def compare(before: nn.Module, after: nn.Module, example: Any, *, seconds: float = 2.0) -> Comparison:
    """Measure two models beside each other.

    >>> small, large = nn.Linear(8, 8), nn.Linear(1024, 1024)
    >>> compare(large, small, (torch.zeros(1, 1024),), seconds=0.1)
    Traceback (most recent call last):
    secateur.errors.TraceError: Linear could not be run on the example: ...
    >>> compare(large, nn.Linear(1024, 8), torch.zeros(1, 1024), seconds=0.1).ratio < 1
    True

    They run in turns, and each turn gives one ratio: what slows the machine down for a while slows both.
    """
    check("compare", PlanError, locals(), seconds=_SECONDS)
    with ExitStack() as context:
        named = {"before": before, "after": after}
        runs = [context.enter_context(_ready(model, example, name)) for name, model in named.items()]
        first, second = _in_turns(runs, seconds)
    ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
    return Comparison(_timing(first), _timing(second), ratio)


@contextmanager
def _ready(model: nn.Module, example: Any, name: str = "a model") -> Iterator[TimedRun]:
    """A function that runs a model once, in eval mode; afterwards the model is as it was."""
    inner = unwrap(model, name=name)
    check_run(inner)
    for place, tensor in chain(inner.named_parameters(), inner.named_buffers()):
        if tensor.is_meta:
            raise TraceError(f"{place} is on the meta device, where nothing can be timed; give the model real tensors")
    args, kwargs = arguments(example)

    def run() -> Any:
        return model(*args, **kwargs)

    with untouched(inner) as undo, torch.no_grad():
        undo.keep(*inner.buffers())
        for module in inner.modules():
            module.__dict__["training"] = False
        try:
            run()
        except Exception as error:  # any code of the user's may run here
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise TraceError(
                f"{type(inner).__name__} could not be run on the example: {text}. Check that model(example) "
                "works: a tensor is passed as it is, a tuple as arguments, a dict by keyword"
            ) from error
        yield run


def timer() -> float:
    """The time at which everything asked for so far is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def clock() -> Callable[[], float]:
    """The clock to time by. One thread on a CPU has its own, which stands still while others have the processor."""
    alone = torch.get_num_threads() == 1 and not torch.accelerator.is_available()
    return time.thread_time if alone else timer


def sample(run: TimedRun, number: int) -> float:
    """Seconds of one run, from so many in a row."""
    now = clock()
    start = now()
    for _ in range(number):
        run()
    return (now() - start) / number


def _in_turns(runs: Sequence[TimedRun], seconds: float) -> list[list[float]]:
    """Samples of each, taken in turns, every other turn in reverse order, for about so many seconds."""
    once = [min(sample(run, 1), sample(run, 1)) for run in runs]
    numbers = [max(1, round(_SHORTEST / max(spent, 1e-9))) for spent in once]
    turn = sum(spent * number for spent, number in zip(once, numbers, strict=True))
    count = min(max(round(seconds / turn), _FEWEST), _MOST)
    samples: list[list[float]] = [[] for _ in runs]
    for i in range(count):
        for j in range(len(runs)) if i % 2 else reversed(range(len(runs))):
            samples[j].append(sample(runs[j], numbers[j]))
    return samples


def _timing(samples: Sequence[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4)
    return Timing(median, high - low, len(samples), torch.get_num_threads())
