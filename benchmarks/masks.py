"""Masks: `torch.nn.utils.prune` and `secateur.prune` side by side, one thread, a process for every figure.

    python benchmarks/masks.py            everything (a few minutes: torch needs a minute for 100M weights)
    python benchmarks/masks.py --quick    without the 100M weights, fewer repeats

Times are the best of a few. Memory is the peak above the model. Goals are judged by what this run measured.
"""

import argparse
import copy
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from _side_by_side import in_own_process, load_torchvision, paired, seconds_and_peak, touch_memory

LIBRARIES = {"torch": "torch.nn.utils.prune", "ours": "secateur.prune"}


def layers(count: int, side: int) -> Callable[[], list[nn.Linear]]:
    return lambda: [nn.Linear(side, side, bias=False) for _ in range(count)]


def l1(prune: Any, model: list[nn.Linear]) -> None:
    prune.l1_unstructured(model[0], "weight", amount=0.5)


def global_l1(prune: Any, model: list[nn.Linear]) -> None:
    prune.global_unstructured([(layer, "weight") for layer in model], prune.L1Unstructured, amount=0.5)


def ln(prune: Any, model: list[nn.Linear]) -> None:
    prune.ln_structured(model[0], "weight", amount=0.5, n=2, dim=0)


def random(prune: Any, model: list[nn.Linear]) -> None:
    prune.random_unstructured(model[0], "weight", amount=0.5)


def ten_rounds(prune: Any, model: list[nn.Linear]) -> None:
    for _ in range(10):
        prune.l1_unstructured(model[0], "weight", amount=0.067)  # half are left in the end


def half_is_gone(model: list[nn.Linear]) -> None:
    gone = sum(int((layer.weight_mask == 0).sum()) for layer in model)
    total = sum(layer.weight_mask.numel() for layer in model)
    if not 0.499 < gone / total < 0.501:
        raise AssertionError(f"{gone} of {total} weights are pruned, not half")


@dataclass(frozen=True)
class Case:
    """A call to time, on a model of `count` square layers."""

    name: str
    run: Callable[[Any, list[nn.Linear]], None]
    count: int
    side: int
    repeats: int = 5
    slow: bool = False

    @property
    def weights(self) -> int:
        return self.count * self.side**2


CASES = {
    case.name: case
    for case in (
        Case("l1, one 4096x4096", l1, 1, 4096),
        Case("global l1, 1M", global_l1, 1, 1024),
        Case("global l1, 10M", global_l1, 10, 1024),
        Case("global l1, 101M", global_l1, 6, 4096, repeats=2, slow=True),
        Case("ln rows, one 4096x4096", ln, 1, 4096),
        Case("random, one 4096x4096", random, 1, 4096),
        Case("l1 ten rounds, 2048x2048", ten_rounds, 1, 2048),
    )
}

# name: (batch, training)
STEPS = {
    "training step, batch 1": (1, True),
    "training step, batch 8": (8, True),
    "inference, batch 1": (1, False),
    "inference, batch 8": (8, False),
}


def run_case(name: str, library: str, quick: bool) -> dict[str, float]:
    case = CASES[name]
    prune = importlib.import_module(LIBRARIES[library])
    touch_memory(4 * case.weights * 13)
    l1(prune, layers(1, 64)())
    repeats = 1 if quick else case.repeats
    make = layers(case.count, case.side)
    return seconds_and_peak(make, lambda model: case.run(prune, model), half_is_gone, repeats)


def run_step(name: str, library: str, quick: bool) -> dict[str, float]:
    """A masked ResNet-18 over a dense one, images of 64x64."""
    batch, training = STEPS[name]
    prune = importlib.import_module(LIBRARIES[library])
    dense = load_torchvision().models.resnet18().train(training)
    masked = copy.deepcopy(dense)
    weights = [(m, "weight") for m in masked.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    prune.global_unstructured(weights, prune.L1Unstructured, amount=0.5)
    x = torch.randn(batch, 3, 64, 64)

    def step_of(model: nn.Module) -> Callable[[], None]:
        if not training:
            return lambda: infer(model, x)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        return lambda: train(model, x, optimizer)

    rounds = {True: 30, False: 120}[training] // (2 if quick else 1)
    return {"ratio": paired(step_of(dense), step_of(masked), rounds)}


@torch.no_grad()
def infer(model: nn.Module, x: torch.Tensor) -> None:
    model(x)


def train(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def compare(run: list[str], quick: bool) -> dict[str, dict[str, dict[str, float]]]:
    flags = ["--quick"] if quick else []
    return {
        name: {library: in_own_process(__file__, "--worker", name, library, *flags) for library in LIBRARIES}
        for name in run
    }


def print_cases(results: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"{'pruning':28}{'torch':>10}{'ours':>10}{'faster':>9}{'torch peak':>13}{'ours peak':>12}{'less':>8}")
    for name, result in results.items():
        theirs, ours = result["torch"], result["ours"]
        print(
            f"{name:28}{theirs['seconds']:>9.3f}s{ours['seconds']:>9.3f}s"
            f"{theirs['seconds'] / ours['seconds']:>8.1f}x"
            f"{theirs['peak'] / 1e9:>10.3f} GB{ours['peak'] / 1e9:>9.3f} GB"
            f"{theirs['peak'] / max(ours['peak'], 1):>7.1f}x"
        )


def print_steps(results: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"\n{'masked over dense, ResNet-18':28}{'torch':>10}{'ours':>10}")
    for name, result in results.items():
        print(f"{name:28}{result['torch']['ratio']:>9.3f}x{result['ours']['ratio']:>9.3f}x")


def print_goals(cases: dict[str, Any], steps: dict[str, Any]) -> None:
    def faster(name: str) -> float:
        return cases[name]["torch"]["seconds"] / cases[name]["ours"]["seconds"]

    goals = [("l1 on one layer at least 10x faster", faster("l1, one 4096x4096"), ">=", 10.0)]
    big = "global l1, 101M"
    sizes = ("global l1, 10M", big) if big in cases else ("global l1, 1M", "global l1, 10M")
    if big in cases:
        goals.append(("global l1 over 101M at least 20x faster", faster(big), ">=", 20.0))
        goals.append(("global l1 over 101M at most 1.0 GB", cases[big]["ours"]["peak"] / 1e9, "<=", 1.0))
    each = [cases[n]["ours"]["seconds"] / CASES[n].weights for n in sizes]
    goals.append((f"time per weight, {sizes[1]} over {sizes[0]}, at most 2x", each[1] / each[0], "<=", 2.0))
    goals += [
        (f"{name}, at most 1.02x of dense", steps[name]["ours"]["ratio"], "<=", 1.02)
        for name in steps
        if name.startswith("inference")
    ]
    print("\ngoals")
    for text, value, sign, bound in goals:
        met = value >= bound if sign == ">=" else value <= bound
        print(f"  {'met   ' if met else 'MISSED'}  {text}: {value:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the 100M weights, repeat less")
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "LIBRARY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.worker:
        name, library = options.worker
        run = run_case if name in CASES else run_step
        print(json.dumps(run(name, library, options.quick)))
        return
    cases = compare([n for n, c in CASES.items() if not (options.quick and c.slow)], options.quick)
    print_cases(cases)
    steps = compare(list(STEPS), options.quick)
    print_steps(steps)
    print_goals(cases, steps)


if __name__ == "__main__":
    main()
