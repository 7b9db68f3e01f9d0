"""`secateur.ao` beside `torch.ao.pruning`: the time and memory of a step.

    python benchmarks/ao.py

Every figure is taken in a process of its own, on one thread, the two libraries in turn. "first" is the first
step of a fresh process, "best" the fastest of the later ones; memory is the peak above that of the prepared
model.
"""

import argparse
import importlib
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

LIBRARIES = {
    "secateur": ("secateur.ao", "secateur.ao"),
    "torch": ("torch.ao.pruning", "torch.ao.pruning._experimental.pruner"),
}


def conv(filters: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(512, filters, 3, bias=False))


def matrix() -> nn.Module:
    return nn.Sequential(nn.Linear(4096, 4096, bias=False))


WIDE = "FPGM L2, 2048x512x3x3"

# name -> (model, library's two modules -> sparsifier)
CASES: dict[str, tuple[Any, Any]] = {
    "FPGM L2, 512x512x3x3": (lambda: conv(512), lambda _, pruners: pruners.FPGMPruner(0.5)),
    WIDE: (lambda: conv(2048), lambda _, pruners: pruners.FPGMPruner(0.5)),
    "FPGM L1, 512x512x3x3": (lambda: conv(512), lambda _, pruners: pruners.FPGMPruner(0.5, dist=1)),
    "Saliency, 2048x512x3x3": (
        lambda: conv(2048),
        lambda _, pruners: pruners.SaliencyPruner({"sparsity_level": 0.5}),
    ),
    "WeightNorm 1x4, 4096x4096": (matrix, lambda sparsifiers, _: sparsifiers.WeightNormSparsifier(0.5)),
    "WeightNorm 2:4, 4096x4096": (
        matrix,
        lambda sparsifiers, _: sparsifiers.WeightNormSparsifier(1.0, zeros_per_block=2),
    ),
    "WeightNorm 1x1, 4096x4096": (
        matrix,
        lambda sparsifiers, _: sparsifiers.WeightNormSparsifier(0.5, (1, 1)),
    ),
}


def measure(case: str, library: str, repeats: int) -> dict[str, float]:
    """One case in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make_model, make_sparsifier = CASES[case]
    model = make_model()
    sparsifier = make_sparsifier(*map(importlib.import_module, LIBRARIES[library]))
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    before, seconds = peak_megabytes(), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        sparsifier.step()
        seconds.append(time.perf_counter() - start)
    mask = sparsifier.state["0.weight"]["mask"]
    return {
        "first": seconds[0],
        "best": min(seconds[1:]),
        "megabytes": peak_megabytes() - before,
        "kept": mask.float().mean().item(),
    }


def least_seconds(rows: int, repeats: int) -> float:
    """Of the products of each pair of filters once, which L2 distances are made of: FPGM cannot take less."""
    torch.set_num_threads(1)
    filters = conv(rows)[0].weight.detach().flatten(1)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for first in range(0, rows, 128):
            torch.mm(filters[: first + 128], filters[first : first + 128].T)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_child(case: str, library: str, repeats: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", case, "--library", library, "--repeats", str(repeats)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return result


def compare(case: str, repeats: int, rounds: int) -> dict[str, dict[str, float]]:
    taken: dict[str, list[dict[str, float]]] = {library: [] for library in LIBRARIES}
    for _ in range(rounds):
        for library, runs in taken.items():
            runs.append(in_child(case, library, repeats))
    figures = {
        library: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for library, runs in taken.items()
    }
    ours, theirs = figures["secateur"], figures["torch"]
    print(f"{case:28}", end="")
    for key in ("first", "best"):
        print(f"  {ours[key]:7.3f} {theirs[key]:7.3f} {theirs[key] / ours[key]:5.1f}x", end="")
    print(f"  {ours['megabytes']:6.0f} {theirs['megabytes']:6.0f}   {ours['kept']:.3f} {theirs['kept']:.3f}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="one case only")
    parser.add_argument("--library", choices=LIBRARIES, help="measure in this process and print JSON")
    parser.add_argument("--repeats", type=int, default=3, help="steps after the first")
    parser.add_argument("--rounds", type=int, default=3, help="processes per figure; the median is shown")
    options = parser.parse_args()
    if options.library:
        print(json.dumps(measure(options.case, options.library, options.repeats)))
        return
    print(f"{'seconds: ours, torch, ratio':28}  {'first step':^22}  {'best step':^22}  {'peak MB':^13}   kept")
    for case in [options.case] if options.case else CASES:
        figures = compare(case, options.repeats, options.rounds)
        if case == WIDE:
            print_goal(figures["torch"]["best"], figures["secateur"]["best"], least_seconds(2048, options.repeats))


def print_goal(theirs: float, ours: float, least: float) -> None:
    """Whether the goal for the wide layer is met, and what stands in the way."""
    print(f"  goal, 5x: {'met' if theirs >= 5 * ours else 'MISSED'}; the bare products of all pairs of filters take")
    print(f"  {least:.3f} s, so with exact distances {theirs / least:.1f}x is the most that can be had here")


if __name__ == "__main__":
    main()
