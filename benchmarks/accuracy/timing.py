"""Seconds of a dense model beside those of a cut one, measured in turns."""

import statistics
from typing import Any

import torch
from benchmarks.accuracy.tasks import run
from torch import nn
from torch.utils.benchmark import Timer


def _timer(model: nn.Module, inputs: Any) -> Timer:
    return Timer("run(model, inputs)", globals={"run": run, "model": model, "inputs": inputs})


def side_by_side(dense: nn.Module, cut: nn.Module, inputs: Any, rounds: int = 9) -> dict[str, float]:
    """Milliseconds of each (the median of the rounds), and the median of the ratios of neighbouring rounds.

    A noisy machine is slow for both of two runs that follow one another, so their ratio is steadier than either.
    """
    timers = _timer(dense, inputs), _timer(cut, inputs)
    with torch.inference_mode():
        number = max(1, int(0.3 / timers[0].timeit(2).mean))
        pairs = [tuple(timer.timeit(number).mean for timer in timers) for _ in range(rounds)]
    return {
        "dense_ms": 1e3 * statistics.median(pair[0] for pair in pairs),
        "cut_ms": 1e3 * statistics.median(pair[1] for pair in pairs),
        "speedup": statistics.median(pair[0] / pair[1] for pair in pairs),
    }
