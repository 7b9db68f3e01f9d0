"""Zeros in one shot, side by side with SparseGPT, Wanda, RIA and magnitude: `make bench-sparse`.

    python -m benchmarks.sparse language                        # SmolLM2-135M on WikiText-2: hours on one core
    python -m benchmarks.sparse language --patterns 2:4 --methods SparseGPT ADMM
    python -m benchmarks.sparse vision --models resnet56        # CIFAR-10, three seeds
    python -m benchmarks.sparse speed                           # where zeros help, and where they do not
    python -m benchmarks.sparse page                            # what was measured, as a page

Every method gets the same windows or images to learn from and the same way through the model; only what it does to a
layer differs. Results go to `benchmarks/results/sparse-*.json` after each measurement, each with its commit, and from
there to `sparse.md`. What is there already is not measured again: delete a row to have it anew.
"""

import argparse
import copy
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks._side_by_side import load_torchvision
from torch import Tensor, nn

import secateur as sec
from secateur.sparse import Spread

load_torchvision()

RESULTS = Path(__file__).parent / "results"
LANGUAGE = {"50%": sec.Unstructured(0.5), "60%": sec.Unstructured(0.6), "2:4": sec.NM(2, 4), "4:8": sec.NM(4, 8)}
METHODS: dict[str, Callable[[], Any]] = {
    "magnitude": sec.Magnitude,
    "Wanda": sec.Wanda,
    "RIA": sec.RIA,
    "SparseGPT": sec.SparseGPT,
    "ADMM": sec.ADMM,
}


@cache
def commit() -> str:
    """The commit that was checked out when this began, marked where files differ from it."""
    run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    return run.stdout.strip()


class Table:
    """Rows of results in a file, written after each."""

    def __init__(self, name: str) -> None:
        self._path = RESULTS / f"sparse-{name}.json"
        self.rows: list[dict[str, Any]] = json.loads(self._path.read_text())["rows"] if self._path.exists() else []

    def has(self, **key: Any) -> bool:
        """Whether this was measured."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, **row: Any) -> None:
        """Keep a row, and print it."""
        self.rows.append({**row, "commit": commit()})
        command = f"python -m benchmarks.sparse {shlex.join(sys.argv[1:])}"
        self._path.write_text(json.dumps({"command": command, "rows": self.rows}, indent=1) + "\n")
        print(
            "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{value}" for name, value in row.items())
        )
        sys.stdout.flush()


# language ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def perplexity(model: nn.Module, windows: Tensor, at_once: int = 1) -> float:
    """Of the tokens that follow the first of each window."""
    total = 0.0
    for tokens in windows.split(at_once):
        for logits, right in zip(model(tokens)[:, :-1], tokens[:, 1:], strict=True):
            total += float(F.cross_entropy(logits, right, reduction="sum"))
    return math.exp(total / (windows.numel() - len(windows)))


def language(args: argparse.Namespace) -> None:
    """SmolLM2-135M-Instruct, 16 windows of 512 tokens to learn from, the first 80 of the test text to judge by."""
    from benchmarks.accuracy import language as texts

    table, tests = Table("smollm2"), texts.windows("test", args.windows)
    batches = list(texts.windows("train", args.calibration).split(4))
    dense = texts.smollm2()
    if not table.has(method="dense", windows=args.windows):
        table.add(method="dense", pattern="", windows=args.windows, perplexity=perplexity(dense, tests), seconds=0.0)
    for name in args.patterns or LANGUAGE:
        for method in args.methods or METHODS:
            key = {"method": method, "pattern": name, "windows": args.windows, "calibration": args.calibration}
            if table.has(**key):
                continue
            model = copy.deepcopy(dense)
            begun = time.process_time()
            report = sec.sparsify(model, batches, LANGUAGE[name], method=METHODS[method]())
            seconds = time.process_time() - begun
            found = perplexity(model, tests)
            table.add(**key, perplexity=found, seconds=seconds, sparsity=report.sparsity)
            del model


# vision --------------------------------------------------------------------------------------------------------------


class Global(Spread):
    """One threshold for all layers on a score of each weight that grows with its magnitude: no layer is spared."""

    def __init__(self, score: Callable[[Tensor], Tensor]) -> None:
        self._score = score

    def sparsities(self, model: nn.Module, names: Sequence[str], sparsity: float, batches: Sequence[Any]) -> Any:
        scores = {name: self._score(model.get_parameter(name).detach().flatten()) for name in names}
        every = torch.cat(list(scores.values()))
        least = every.kthvalue(round(sparsity * len(every))).values
        return {name: min(float((score <= least).double().mean()), 1 - 1e-9) for name, score in scores.items()}


def lamp(weight: Tensor) -> Tensor:
    """w² over the sum of all squares that are not smaller (Lee et al., 2021)."""
    squares, order = weight.square().sort()
    left = squares.flip(0).cumsum(0).flip(0)
    return torch.empty_like(squares).index_copy_(0, order, squares / left)


VISION: dict[str, tuple[Any, Any]] = {
    "ADMM": (sec.ADMM(), None),
    "ADMM, prices": (sec.ADMM(), sec.Prices()),
    "SparseGPT": (sec.SparseGPT(), None),
    "SparseGPT, ERK": (sec.SparseGPT(), sec.ERK()),
    "magnitude, LAMP": (sec.Magnitude(), Global(lamp)),
    "magnitude, global": (sec.Magnitude(), Global(torch.abs)),
    "magnitude, ERK": (sec.Magnitude(), sec.ERK()),
    "magnitude, uniform": (sec.Magnitude(), None),
}


def vision(args: argparse.Namespace) -> None:
    """ResNet-56 and VGG16 on CIFAR-10, 512 training images to learn from, drawn anew for each seed."""
    from benchmarks.accuracy import data, models

    table, split = Table("cifar10"), data.cifar10()
    for name in args.models:
        dense = {"resnet56": models.resnet56, "vgg16": models.vgg16}[name]()
        tests = data.pixels(split.test_x[: args.images]), split.test_y[: args.images]
        for seed in range(args.seeds):
            drawn = torch.randperm(len(split.train_y), generator=torch.Generator().manual_seed(seed))[:512]
            batches = list(data.pixels(split.train_x[drawn]).split(128))
            for sparsity in args.sparsities:
                for method in args.methods or VISION:
                    key = {"model": name, "method": method, "sparsity": sparsity, "seed": seed, "images": args.images}
                    if table.has(**key):
                        continue
                    model = copy.deepcopy(dense)
                    begun = time.process_time()
                    solve, spread = VISION[method]
                    sec.sparsify(model, batches, sec.Unstructured(sparsity), method=solve, spread=spread)
                    table.add(**key, seconds=time.process_time() - begun, accuracy=accuracy(model, *tests))
        if not table.has(model=name, method="dense", images=args.images):
            table.add(model=name, method="dense", images=args.images, accuracy=accuracy(dense, *tests))


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent of the images whose class is right."""
    model, pairs = model.to(memory_format=torch.channels_last), zip(images.split(100), labels.split(100), strict=True)
    right = sum(int((model(x.contiguous(memory_format=torch.channels_last)).argmax(-1) == y).sum()) for x, y in pairs)
    return 100 * right / len(labels)


# speed ---------------------------------------------------------------------------------------------------------------


def speed(args: argparse.Namespace) -> None:
    """One linear layer, dense and as torch.sparse has it, at growing sparsity."""
    table = Table("speed")
    for size, rows in ((1024, 1), (1024, 64)):
        x = torch.randn(rows, size)
        for sparsity in (0.5, 0.8, 0.95):
            for layout, pattern in (("CSR", sec.Unstructured(sparsity)), ("BSR 8x8", sec.Block(8, 8, sparsity))):
                weight = torch.randn(size, size)
                weight = torch.where(pattern.mask(weight.abs()), weight, 0)
                packed = weight.to_sparse_csr() if layout == "CSR" else weight.to_sparse_bsr((8, 8))
                dense, sparse = _seconds((weight, packed), x)
                row = {
                    "layout": layout,
                    "size": size,
                    "rows": rows,
                    "sparsity": sparsity,
                    "threads": torch.get_num_threads(),
                }
                table.add(**row, dense_us=dense * 1e6, sparse_us=sparse * 1e6, faster=dense / sparse)


def _seconds(weights: Sequence[Tensor], x: Tensor) -> list[float]:
    """The least time of W·x for each weight, in turns: on a busy machine, what is least was least disturbed."""
    least = [math.inf] * len(weights)
    column = x.T.contiguous()
    for _ in range(100):
        for i, weight in enumerate(weights):
            begun = time.perf_counter()
            weight @ column
            least[i] = min(least[i], time.perf_counter() - begun)
    return least


# the page ------------------------------------------------------------------------------------------------------------

GOAL = 0.2  # of SparseGPT's excess over the dense model, what ours is to be below it


def page(args: argparse.Namespace) -> None:
    """All that was measured, as `sparse.md`."""
    made = "\n".join(["# Zeros in one shot", "", *_language_lines(Table("smollm2").rows), *_vision_lines()])
    (RESULTS / "sparse.md").write_text(made + "\n")
    print(made)


def _commits(rows: Sequence[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(f"`{row['commit']}`" for row in rows))


def _language_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Perplexities, and by how much of SparseGPT's excess over the dense model ours is below it."""
    found = {(row["method"], row["pattern"]): row["perplexity"] for row in rows}
    dense = found["dense", ""]
    lines = [
        "`python -m benchmarks.sparse language` at "
        + _commits(rows)
        + ": SmolLM2-135M-Instruct, WikiText-2, perplexity",
        f"on the first 80 test windows of 512 tokens (40,880 tokens; dense {dense:.2f}), from the first 16 windows of",
        "the training text. A dash: not measured.",
        "",
        "| method | " + " | ".join(LANGUAGE) + " |",
        "|---" * (1 + len(LANGUAGE)) + "|",
    ]
    for method in METHODS:
        shown = [f"{found[method, p]:.2f}" if (method, p) in found else "–" for p in LANGUAGE]
        lines.append(f"| {method} | " + " | ".join(shown) + " |")
    lines += ["", f"The goal: ADMM below SparseGPT by {GOAL:.0%} of its excess over dense.", ""]
    for p in LANGUAGE:
        if ("ADMM", p) in found and ("SparseGPT", p) in found:
            theirs, ours = found["SparseGPT", p] - dense, found["ADMM", p] - dense
            less = 1 - ours / theirs
            lines.append(f"- {p}: {less:.1%} below, {'met' if less >= GOAL else 'missed'}")
        else:
            lines.append(f"- {p}: not measured")
    return [*lines, ""]


def _vision_lines() -> list[str]:
    """Accuracies, mean and standard deviation over the seeds."""
    rows = [row for row in Table("cifar10").rows if row["images"] == 10_000]
    if not rows:
        return []
    at = {row["model"]: row["accuracy"] for row in rows if row["method"] == "dense"}
    dense = ", ".join(f"{name} {accuracy:.2f}" for name, accuracy in at.items()) or "not measured"
    lines = [
        "`python -m benchmarks.sparse vision` at " + _commits(rows) + ": CIFAR-10, percent right of all 10,000 test",
        f"images (dense: {dense}), from 512 training images that each seed draws anew; mean ± standard deviation, in",
        "brackets the number of seeds. Batch norms take their statistics anew with every method.",
    ]
    columns = sorted({(row["model"], row["sparsity"]) for row in rows if row["method"] != "dense"})
    lines += [
        "",
        "| method | " + " | ".join(f"{m}, {s:.0%}" for m, s in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for method in VISION:
        cells = [
            [r["accuracy"] for r in rows if (r["method"], r["model"], r.get("sparsity")) == (method, *c)]
            for c in columns
        ]
        if any(cells):
            lines.append(f"| {method} | " + " | ".join(map(_cell, cells)) + " |")
    return [*lines, ""]


def _cell(found: Sequence[float]) -> str:
    if not found:
        return "–"
    spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.2f}{spread} ({len(found)})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse", description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(required=True, dest="part")
    one = parts.add_parser("language")
    one.add_argument("--patterns", nargs="+", choices=LANGUAGE)
    one.add_argument("--windows", type=int, default=80)
    one.add_argument("--calibration", type=int, default=16)
    two = parts.add_parser("vision")
    two.add_argument("--models", nargs="+", default=["resnet56", "vgg16"])
    two.add_argument("--sparsities", nargs="+", type=float, default=[0.8, 0.9, 0.95])
    two.add_argument("--seeds", type=int, default=3)
    two.add_argument("--images", type=int, default=10_000)
    one.add_argument("--methods", nargs="+", choices=METHODS)
    two.add_argument("--methods", nargs="+", choices=VISION)
    parts.add_parser("speed")
    parts.add_parser("page")
    args = parser.parse_args(arguments)
    commit()
    {"language": language, "vision": vision, "speed": speed, "page": page}[args.part](args)


if __name__ == "__main__":
    main()
