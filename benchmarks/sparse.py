"""Zeros in one shot, side by side with SparseGPT, Wanda, RIA and magnitude: `make bench-sparse`.

    python -m benchmarks.sparse language                        # SmolLM2-135M on WikiText-2: hours on one core
    python -m benchmarks.sparse language --patterns 2:4 --methods SparseGPT ADMM
    python -m benchmarks.sparse vision --models resnet56        # CIFAR-10, three seeds
    python -m benchmarks.sparse speed                           # where zeros help, and where they do not

Every method gets the same windows or images to learn from and the same way through the model; only what it does to a
layer differs. Results go to `benchmarks/results/sparse-*.json` after each measurement, with the command and the commit;
what is there already for this commit of the library is not measured again.
"""

import argparse
import copy
import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks._side_by_side import load_torchvision
from torch import Tensor, nn

import secateur as sec

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


def commit() -> str:
    """The commit that is checked out, marked where files differ from it."""
    run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    return run.stdout.strip()


class Table:
    """Rows of results in a file, written after each."""

    def __init__(self, name: str) -> None:
        self._path = RESULTS / f"sparse-{name}.json"
        self.rows: list[dict[str, Any]] = json.loads(self._path.read_text())["rows"] if self._path.exists() else []

    def has(self, **key: Any) -> bool:
        """Whether this was measured with the code as it is."""
        wanted = {**key, "commit": commit()}
        return any(all(row.get(name) == value for name, value in wanted.items()) for row in self.rows)

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


def vision(args: argparse.Namespace) -> None:
    """ResNet-56 and VGG16 on CIFAR-10, 512 training images to learn from, drawn anew for each seed."""
    from benchmarks.accuracy import data, models

    table, split = Table("cifar10"), data.cifar10()
    for name in args.models:
        dense = {"resnet56": models.resnet56, "vgg16": models.vgg16}[name]()
        tests = data.pixels(split.test_x[: args.images]), split.test_y[: args.images]
        if not table.has(model=name, method="dense", images=args.images):
            table.add(model=name, method="dense", images=args.images, accuracy=accuracy(dense, *tests))
        for seed in range(args.seeds):
            drawn = torch.randperm(len(split.train_y), generator=torch.Generator().manual_seed(seed))[:512]
            batches = list(data.pixels(split.train_x[drawn]).split(128))
            for sparsity in args.sparsities:
                for method in args.methods or METHODS:
                    key = {"model": name, "method": method, "sparsity": sparsity, "seed": seed, "images": args.images}
                    if table.has(**key):
                        continue
                    model = copy.deepcopy(dense)
                    begun = time.process_time()
                    sec.sparsify(model, batches, sec.Unstructured(sparsity), method=METHODS[method]())
                    table.add(**key, seconds=time.process_time() - begun, accuracy=accuracy(model, *tests))


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent of the images whose class is right."""
    right = sum(
        int((model(x).argmax(-1) == y).sum()) for x, y in zip(images.split(250), labels.split(250), strict=True)
    )
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
    for each in (one, two):
        each.add_argument("--methods", nargs="+", choices=METHODS)
    parts.add_parser("speed")
    args = parser.parse_args(arguments)
    {"language": language, "vision": vision, "speed": speed}[args.part](args)


if __name__ == "__main__":
    main()
