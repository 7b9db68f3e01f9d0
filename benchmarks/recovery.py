"""How much of a cut comes back in a given time: `sec.compress` and Torch-Pruning, then the same `sec.recover`.

    python benchmarks/recovery.py --minutes 15                     ResNet-56 on CIFAR-10, no labels
    python benchmarks/recovery.py --minutes 120 --labels
    python benchmarks/recovery.py --task ecg_lstm --steps 200      a task of benchmarks/accuracy, by steps

Training data, batches and time are the same for both. The rate, the length and the state that is kept are chosen on
training data that is held back; test data is looked at once, at the end. Time is of the clock: leave the machine alone.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.accuracy import peers
from benchmarks.accuracy.cutting import OURS
from benchmarks.accuracy.suite import TASKS
from benchmarks.accuracy.training import recover

RIVAL = "FPGM global + statistics"  # the best rival on ResNet-56 right after the cut


def main() -> None:
    """Cut, recover and score, one method after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="resnet56", choices=sorted(TASKS))
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--labels", action="store_true")
    parser.add_argument("--rival", default=RIVAL, help="a method of benchmarks/accuracy/peers.py, or none")
    given = parser.parse_args()
    task = TASKS[given.task]
    rivals = [
        method for method in peers.methods(("FPGM", "magnitude L2", "magnitude L1")) if method.name == given.rival
    ]
    print(f"{task.name}, dense: {task.show(task.score(task.load(), task.tests()))}", flush=True)
    for method in (OURS, *rivals):
        model = task.load()
        torch.manual_seed(0)
        method.cut(task, model, task.goal, 0, {})
        cut = task.score(model.eval(), task.tests())
        wall, busy = time.perf_counter(), time.process_time()
        found = recover(task, model, 0, labels=given.labels, steps=given.steps, minutes=given.minutes)
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        after = task.score(model.eval(), task.tests())
        print(found)
        print(f"{method.name}: {task.show(cut)} right after the cut at {task.goal:.2f}x, {task.show(after)} recovered,")
        print(
            f"    {wall / 60:.1f} minutes, {busy / 60:.1f} of the processor, {torch.get_num_threads()} threads",
            flush=True,
        )


if __name__ == "__main__":
    main()
