"""Measure one thing in a process of its own, and compare it between libraries."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def load_torchvision() -> Any:
    """torchvision, beside a CPU build of torch.

    Its wheel is linked to CUDA: without it the C++ operators do not load, and the import fails on the two
    that it looks up at once. Declaring them is enough for everything but `torchvision.ops`.
    """
    for name, schema in (
        ("nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
        ("qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
    ):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)
    import torchvision

    return torchvision


def in_own_process(script: str | Path, *arguments: str, source: Path | None = None) -> dict[str, Any]:
    """What `script` prints last, as JSON, when it is run with `arguments` in a fresh process.

    With `source`, the library is imported from that folder.
    """
    env = os.environ if source is None else {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=env)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def touch_memory(n_bytes: int) -> None:
    """Have the system hand out this much memory once: on a virtual machine the first touch ever is slow."""
    torch.ones(n_bytes // 4)


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def seconds_and_peak(
    prepare: Callable[[], Any], run: Callable[[Any], Any], check: Callable[[Any], Any], repeats: int
) -> dict[str, float]:
    """Best seconds of `run`, and the most memory that its first call took above what was there before.

    `check` looks at the result, outside of the time.
    """
    times: list[float] = []
    peak = 0
    for i in range(repeats):
        state = prepare()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
        before = _status("VmRSS")
        start = time.perf_counter()
        run(state)
        times.append(time.perf_counter() - start)
        peak = peak if i else _status("VmHWM") - before
        check(state)
        del state
    return {"seconds": min(times), "peak": peak}


def paired(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> float:
    """How much longer `second` takes than `first`, run in turns: the ratio of their lower quartiles.

    Other work on the machine only ever adds time, so the faster rounds are the ones that compare.
    """
    times: dict[Callable[[], Any], list[float]] = {first: [], second: []}
    for i in range(rounds + 2):
        for run in (first, second) if i % 2 else (second, first):
            start = time.perf_counter()
            run()
            times[run].append(time.perf_counter() - start)
    quartiles = {run: statistics.quantiles(taken[2:], n=4)[0] for run, taken in times.items()}
    return quartiles[second] / quartiles[first]
