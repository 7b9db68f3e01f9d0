"""Training with zeros from the start: RigL, SET, a static random mask and gradual magnitude pruning at equal steps.

    python benchmarks/sparse_training.py                 Fashion-MNIST, three seeds: an hour on one core
    python benchmarks/sparse_training.py --steps 200 --seeds 1    a quick look

Four convolutions, the same data in the same order and the same recipe (SGD, momentum, a rate that falls like a cosine)
for all; only the masks differ. Accuracy is that on the whole test set, after the last step: nothing is chosen
by it. Results go to benchmarks/results/sparse-training.md, .json and .png.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.accuracy import data
from benchmarks.accuracy.training import draws

from secateur import training

RESULTS = Path(__file__).parent / "results"
BATCH, RATE = 128, 0.1
SPARSITIES = (0.9, 0.95)

Make = Callable[[float, int], training.SparseMethod]


def every(steps: int) -> int:
    """How often connections change: forty times."""
    return max(1, steps // 40)


METHODS: dict[str, Make] = {
    "static, ERK": lambda s, n: training.Static(s),
    "SET, ERK": lambda s, n: training.SET(s, every=every(n), end=3 * n // 4),
    "RigL, uniform": lambda s, n: training.RigL(s, training.Uniform(), every=every(n), end=3 * n // 4),
    "RigL, ERK": lambda s, n: training.RigL(s, every=every(n), end=3 * n // 4),
    "GMP": lambda s, n: training.GMP(s, begin=n // 10, end=3 * n // 4, every=every(n)),
}


def convolutions(seed: int) -> nn.Sequential:
    """Four convolutions of 16, 32, 64 and 64 channels with batch norms, and a linear layer on their mean."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 16, 1), (16, 32, 2), (32, 64, 2), (64, 64, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def accuracy(steps: int, seed: int, make: Make | None, sparsity: float, split: data.Split) -> dict[str, Any]:
    """Train once; what came of it."""
    start, model = time.perf_counter(), convolutions(seed)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=1e-4)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    sparse = None
    if make is not None:
        sparse = training.SparseTraining(
            model, optimizer, make(sparsity, steps), protect=(f"{len(model) - 1}",), seed=seed
        )
    for _, (x, y) in zip(range(steps), batches(split, seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        rate.step()
    zeros = 0.0 if sparse is None else sparse.sparsity
    if sparse is not None:
        sparse.finish()
    model.eval()
    with torch.inference_mode():
        found = torch.cat([model(part).argmax(-1) for part in data.pixels(split.test_x).split(500)])
        right = float((found == split.test_y).float().mean())
    return {"accuracy": 100 * right, "sparsity": zeros, "seconds": time.perf_counter() - start}


def batches(split: data.Split, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Training data in an order of its own for each seed, the same for all methods."""
    for chosen in draws(len(split.train_y), BATCH, seed):
        yield data.pixels(split.train_x[chosen]), split.train_y[chosen]


def run(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Every method at every sparsity with every seed."""
    split, records = data.fashion_mnist(), []
    for seed in range(seeds):
        for name, sparsity in [("dense", 0.0), *((name, s) for s in SPARSITIES for name in METHODS)]:
            found = accuracy(steps, seed, METHODS.get(name), sparsity, split)
            records.append({"method": name, "asked": sparsity, "seed": seed, **found})
            print(
                f"{name:14} {sparsity:.0%} seed {seed}: {found['accuracy']:.2f}%  {found['seconds']:.0f} s", flush=True
            )
    return records


def table(records: list[dict[str, Any]], steps: int, seeds: int) -> str:
    """What was measured, and whether the order is that of the papers."""

    def scores(name: str, sparsity: float) -> list[float]:
        return [r["accuracy"] for r in records if r["method"] == name and r["asked"] == sparsity]

    def cell(values: list[float]) -> str:
        return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")

    lines = ["# Training with zeros from the start", ""]
    lines += [f"`python benchmarks/sparse_training.py --steps {steps} --seeds {seeds}`: Fashion-MNIST, four"]
    lines += [
        f"convolutions, {steps} steps of {BATCH}; the linear layer is dense. Accuracy in percent on the test set,"
    ]
    lines += [f"mean and standard deviation of {seeds} seeds.", ""]
    lines += [
        "| method | " + " | ".join(f"{s:.0%} zeros" for s in SPARSITIES) + " |",
        "|---|" + "---|" * len(SPARSITIES),
    ]
    lines += ["| dense | " + " | ".join([cell(scores("dense", 0.0))] + [""] * (len(SPARSITIES) - 1)) + " |"]
    for name in METHODS:
        lines.append(f"| {name} | " + " | ".join(cell(scores(name, s)) for s in SPARSITIES) + " |")
    lines += ["", "The order of the papers, difference of the means (and in how many seeds it holds):", ""]
    pairs = [("RigL, ERK", "SET, ERK"), ("SET, ERK", "static, ERK"), ("RigL, ERK", "RigL, uniform")]
    for better, worse in pairs:
        found = []
        for s in SPARSITIES:
            a, b = scores(better, s), scores(worse, s)
            wins = sum(x >= y for x, y in zip(a, b, strict=True))
            found.append(f"{mean(a) - mean(b):+.2f} at {s:.0%} ({wins} of {len(a)})")
        lines.append(f"- {better} over {worse}: {', '.join(found)}")
    gaps = [f"{mean(scores('GMP', s)) - mean(scores('dense', 0.0)):+.2f} at {s:.0%}" for s in SPARSITIES]
    lines += [f"- GMP over dense: {', '.join(gaps)}", ""]
    shapes = [tuple(layer.weight.shape) for layer in convolutions(0) if isinstance(layer, nn.Conv2d)]
    parts = ", ".join(f"{part:.0%}" for part in training.ERK().densities(shapes, SPARSITIES[0]))
    lines += [f"At {SPARSITIES[0]:.0%} ERK leaves {parts} of the four convolutions, uniform as much of each.", ""]
    return "\n".join(lines)


def picture(records: list[dict[str, Any]], path: Path) -> None:
    """Accuracy by sparsity."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name in METHODS:
        by = [[r["accuracy"] for r in records if r["method"] == name and r["asked"] == s] for s in SPARSITIES]
        spread = [stdev(values) if len(values) > 1 else 0.0 for values in by]
        axes.errorbar([f"{s:.0%}" for s in SPARSITIES], [mean(v) for v in by], spread, label=name, capsize=3)
    axes.axhline(mean(r["accuracy"] for r in records if r["method"] == "dense"), color="black", ls=":", label="dense")
    axes.set(xlabel="zeros", ylabel="test accuracy, %", title="Fashion-MNIST, equal steps")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    records = run(given.steps, given.seeds)
    page = table(records, given.steps, given.seeds)
    print(page)
    (RESULTS / "sparse-training.json").write_text(json.dumps({"steps": given.steps, "records": records}, indent=1))
    (RESULTS / "sparse-training.md").write_text(page)
    picture(records, RESULTS / "sparse-training.png")


if __name__ == "__main__":
    main()
