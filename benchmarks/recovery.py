"""How much of a cut comes back in a given time: `sec.compress` and Torch-Pruning, then the same `sec.recover`.

    python benchmarks/recovery.py --minutes 15                     ResNet-56 on CIFAR-10, no labels
    python benchmarks/recovery.py --minutes 120 --labels
    python benchmarks/recovery.py --processor 30                   as many steps as take that much processor time
    python benchmarks/recovery.py --processor 30 --joint 200       blocks fitted as a whole before
    python benchmarks/recovery.py --steps 800 --cut small.safetensors    a model that sec.compress made before, or
                                                                   benchmarks/ablation.py --save
    python benchmarks/recovery.py --minutes 60 --task smollm2 --factor 1.25 --cut FILE --rival none --tests 80
    python benchmarks/recovery.py --task ecg_lstm --steps 200      a task of benchmarks/accuracy, by steps

Training data, batches and time are the same for both. The rate, the length and the state that is kept are chosen on
training data that is held back; test data is looked at once, at the end. Time is of the clock: leave the machine alone,
or count the processor's.
"""

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.accuracy import language, peers
from benchmarks.accuracy.cutting import OURS, STAND_INS, Method
from benchmarks.accuracy.suite import TASKS
from benchmarks.accuracy.tasks import Task
from benchmarks.accuracy.training import recover

import secateur as sec

RIVAL = "FPGM global + statistics"  # the best rival on ResNet-56 right after the cut


def main() -> None:
    """Cut, recover and score, one method after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="resnet56", choices=sorted(TASKS))
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--processor", type=float, help="minutes of processor time, on a machine that others use too")
    parser.add_argument("--labels", action="store_true")
    parser.add_argument("--factor", type=float, help="of what the task counts, so many times less; the task's goal")
    parser.add_argument("--fresh", action="store_true", help="draw every batch anew, instead of 400 of them once")
    parser.add_argument("--bfloat16", action="store_true", help="train in mixed precision")
    parser.add_argument("--tests", type=int, default=8, help="windows of the test text that SmolLM2 is scored on")
    parser.add_argument("--joint", type=int, default=0, help="steps in which compress fits each block as a whole")
    parser.add_argument("--cut", type=Path, help="a file of a model that was cut before, instead of cutting one")
    parser.add_argument("--rival-only", action="store_true", help="ours was measured before")
    parser.add_argument("--rival", default=RIVAL, help="a method of benchmarks/accuracy/peers.py, or none")
    given = parser.parse_args()
    task = TASKS[given.task]
    factor, tests = given.factor or task.goal, task.tests()
    if task.name == "smollm2":
        tests = [(window, window) for window in language.windows("test", given.tests).split(1)]
    known = (*peers.methods(("FPGM", "magnitude L2", "magnitude L1", "Hessian")), *STAND_INS)
    rivals = [method for method in known if method.name == given.rival]
    print(f"{task.name}, dense: {task.show(task.score(task.load(), tests))}", flush=True)
    cut_by_us = ours(given.joint) if given.cut is None else kept(given.cut)
    for method in (*([] if given.rival_only else [cut_by_us]), *rivals):
        model = task.load()
        torch.manual_seed(0)
        method.cut(task, model, factor, 0, {})
        cut = task.score(model.eval(), tests)
        print(f"{method.name}: {task.show(cut)} right after the cut at {factor:.2f}x", flush=True)
        how = {"labels": given.labels, "fresh": given.fresh, "dtype": torch.bfloat16 if given.bfloat16 else None}
        steps, minutes = given.steps, given.minutes
        if given.processor is not None:
            steps, minutes = steps_in(given.processor, task, model, how), 600
        wall, busy = time.perf_counter(), time.process_time()
        found = recover(task, model, 0, **how, steps=steps, minutes=minutes)
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        after = task.score(model.eval(), tests)
        print(found)
        print(f"{method.name}: {task.show(after)} recovered,")
        print(
            f"    {wall / 60:.1f} minutes, {busy / 60:.1f} of the processor, {torch.get_num_threads()} threads",
            flush=True,
        )


def ours(joint: int) -> Method:
    """`sec.compress`, with its blocks fitted as a whole on four times the data if they take some steps."""
    if not joint:
        return OURS

    def cut(task: Task, model: nn.Module, factor: float, seed: int, _hint: dict[str, Any]) -> dict[str, Any]:
        batches = [inputs for draw in range(4 * seed, 4 * seed + 4) for inputs, _ in task.calibration(draw)]
        sec.compress(model, task.example(), task.budget(factor), batches, joint=joint, timed=False)
        return {}

    return Method(f"sec.compress, joint={joint}", "secateur", cut)


def kept(path: Path) -> Method:
    """What a file holds."""

    def cut(task: Task, model: nn.Module, factor: float, seed: int, _hint: dict[str, Any]) -> dict[str, Any]:
        sec.load(path, model)
        return {}

    return Method(f"sec.compress, as in {path.name}", "secateur", cut)


def steps_in(minutes: float, task: Task, model: nn.Module, how: dict[str, Any]) -> int:
    """How many steps take some minutes of the processor: what more of them take on a copy, and what goes with any."""
    taken, busy = list[int](), list[float]()
    for steps in (8, 24):
        trial, start = copy.deepcopy(model), time.process_time()
        taken.append(recover(task, trial, 0, **how, steps=steps).steps)
        busy.append(time.process_time() - start)
    each = (busy[1] - busy[0]) / (taken[1] - taken[0])
    return max(20, int((60 * minutes - max(0.0, busy[0] - each * taken[0])) / each))


if __name__ == "__main__":
    main()
