"""What rotating and more data bring to `sec.compress`, each alone: no training, one seed.

    python benchmarks/ablation.py minilm --factor 2.1
    python benchmarks/ablation.py smollm2 --factor 1.25 --windows 48 --tests 80

A task of benchmarks/accuracy is cut with the same data twice, with and without the rotation of axes that only linear
maps touch. `--windows` and `--tests` are SmolLM2's: of 512 tokens each, the first of the training and of the test text.
Each row goes to benchmarks/results/ablation.json as soon as it is there, with the command and the commit.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.accuracy import language
from benchmarks.accuracy.suite import TASKS
from benchmarks.accuracy.tasks import Task

import secateur as sec

RESULTS = Path(__file__).parent / "results" / "ablation.json"
WAYS = ("plain", "rotated")


def batches(task: Task, given: argparse.Namespace) -> list[Any]:
    """Inputs alone: no method here has a use for labels."""
    if task.name == "smollm2":
        return list(language.windows("train", given.windows).split(2))
    return [inputs for inputs, _ in task.calibration(0)]


def row(task: Task, way: str, given: argparse.Namespace) -> dict[str, Any]:
    """Cut a fresh model one way and score it."""
    data, model = batches(task, given), task.load()
    tests = task.tests()
    if task.name == "smollm2":
        tests = [(window, window) for window in language.windows("test", given.tests).split(1)]
    importance = sec.Reconstruction(data[:16]) if way == "plain" else None  # as `compress` ranks, without rotating
    start = time.process_time()
    report = sec.compress(model, task.example(), task.budget(given.factor), data, importance=importance, timed=False)
    return {
        "task": task.name,
        "way": way,
        "factor": given.factor,
        "batches": len(data),
        "score": task.show(task.score(model.eval(), tests)),
        "tests": len(tests),
        "output error": report.compensation.after,
        "processor seconds": round(time.process_time() - start),
        "why": report.why,
        "command": shlex.join(["python", "benchmarks/ablation.py", *sys.argv[1:]]),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
    }


def main() -> None:
    """One row after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--factor", type=float, default=2.1)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tests", type=int, default=8)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    given = parser.parse_args()
    for way in given.ways:
        torch.manual_seed(0)
        found = row(TASKS[given.task], way, given)
        print(found, flush=True)
        rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        RESULTS.write_text(json.dumps([*rows, found], indent=1) + "\n")


if __name__ == "__main__":
    main()
