"""What more data, rotations, rank, depth and blocks fitted as a whole bring to `sec.compress`, each alone: no labels.

    python benchmarks/ablation.py minilm --factor 1.25 --batches 8
    python benchmarks/ablation.py resnet56 --ways rotated depth --tests 80
    python benchmarks/ablation.py resnet56 --ways rotated together --batches 16 --tests 80 --seed 1
    python benchmarks/ablation.py smollm2 --factor 1.25 --batches 24 --tests 80
    python benchmarks/ablation.py smollm2 --predicted --batches 3

A task of benchmarks/accuracy is cut with the same data in several ways: without the rotation of axes that only linear
maps touch, with it (as `compress` does by itself), and with one thing more each: layers as products of two where that
pays (those that `--layers` names), as many blocks gone as do best, the layers of each block fitted together (also
without rotating, `together-plain`).
Of `--batches` beyond those of a task's calibration data, further draws of these are taken; `--seed` makes others.
`--tests` are batches of the test data. SmolLM2's batches are two windows of 512 tokens, the first of the training text,
and its `--tests` windows of the test text. With `--predicted` nothing is cut: what `Reconstruction` expects the output
to lose when an eighth, a quarter and a half of each free axis go, summed over all of them, in its own basis and in the
one `compress` chooses.
Each row goes to benchmarks/results/ablation.json as soon as it is there, with the command and the commit.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.accuracy import language
from benchmarks.accuracy.suite import TASKS
from benchmarks.accuracy.tasks import Task

import secateur as sec
from secateur.importance.weights import Weights
from secateur.pipeline.bases import Bases

RESULTS = Path(__file__).parent / "results" / "ablation.json"
WAYS = ("plain", "rotated", "rank", "depth", "together", "together-plain")
SHARES = (1 / 8, 1 / 4, 1 / 2)


def data(task: Task, given: argparse.Namespace) -> list[Any]:
    """Inputs alone: no method here has a use for labels."""
    if task.name == "smollm2":
        return list(language.windows("train", 2 * given.batches).split(2))
    found: list[Any] = []
    for draw in count(1000 * given.seed):
        found += [inputs for inputs, _ in task.calibration(draw)]
        if len(found) >= given.batches:
            return found[: given.batches]
    raise AssertionError


def cut(task: Task, way: str, given: argparse.Namespace) -> dict[str, Any]:
    """Cut a fresh model one way and score it."""
    batches, model, tests = data(task, given), task.load(), task.tests()[: given.tests]
    if task.name == "smollm2":
        tests = [(window, window) for window in language.windows("test", given.tests).split(1)]
    unturned = {"importance": sec.Reconstruction(batches[:16])}  # as `compress` ranks, without rotating
    how: dict[str, Any] = {
        "plain": unturned,
        "rank": {"rank": given.layers},
        "depth": {"blocks": "auto"},
        "together": {"joint": given.steps},
        "together-plain": {"joint": given.steps, **unturned},
    }
    start = time.process_time()
    target = task.budget(given.factor)
    report = sec.compress(model, task.example(), target, batches, **how.get(way, {}), timed=False)
    seconds = round(time.process_time() - start)
    if given.save:
        sec.save(model, given.save / f"{task.name}-{way}.safetensors")
    score = task.show(task.score(model.eval(), tests))
    return {
        "way": way,
        "score": score,
        "tests": len(tests),
        "seed": given.seed,
        "error": report.compensation.after,
        "seconds": seconds,
        "why": report.why,
    }


def predicted(model: nn.Module, example: Any, batches: list[Any]) -> dict[str, list[float]]:
    """What is lost when each share of every free axis goes, as `Reconstruction` tells."""
    graph = sec.trace(model, example)
    bases, criterion = Bases.of(graph, batches), sec.Reconstruction(batches)
    weights = Weights(graph, [own.axis for own in bases.matrices])
    found = {"plain": criterion.scores(weights)}
    with bases.tried():
        found["rotated"] = criterion.scores(weights)
    return {
        way: [sum(_lost(one, share) for one in scores.values()) for share in SHARES] for way, scores in found.items()
    }


def _lost(scores: torch.Tensor, share: float) -> float:
    return float(scores.sort()[0][: round(share * len(scores))].sum()) / 2  # of the loss, to second order


def main() -> None:
    """One row after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--factor", type=float, default=2.1)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--tests", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120, help="of each block, where they are fitted as a whole")
    parser.add_argument("--layers", nargs="+", default=["*"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:2])
    parser.add_argument("--save", type=Path, help="a folder for the models that were cut")
    parser.add_argument("--predicted", action="store_true")
    given = parser.parse_args()
    if given.save:
        given.save.mkdir(parents=True, exist_ok=True)
    task = TASKS[given.task]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    made_by = {"task": task.name, "command": shlex.join(["benchmarks/ablation.py", *sys.argv[1:]]), "commit": commit}
    for way in ("predicted",) if given.predicted else given.ways:
        torch.manual_seed(0)
        found = predicted(task.load(), task.example(), data(task, given)) if given.predicted else cut(task, way, given)
        print(found, flush=True)
        rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        RESULTS.write_text(json.dumps([*rows, made_by | found], indent=1) + "\n")


if __name__ == "__main__":
    main()
