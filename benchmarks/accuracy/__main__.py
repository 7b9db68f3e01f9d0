"""`python -m benchmarks.accuracy [--quick | --goal] [--only TASK ...]`: see the package's docstring."""

import argparse
import json
import platform
import sys
from pathlib import Path

import torch
from benchmarks.accuracy import plots, summary
from benchmarks.accuracy.goals import goals
from benchmarks.accuracy.runner import Runner, Settings, versions
from benchmarks.accuracy.store import Store
from benchmarks.accuracy.suite import TASKS

RESULTS = Path(__file__).parent.parent / "results"
QUICK_TASKS = ("resnet56", "ecg_lstm")
QUICK = Settings(seeds=(0,), importances=("magnitude L2", "Taylor"), only_goal=True, timely=False)


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    settings = QUICK if arguments.quick else Settings(only_goal=arguments.goal)
    names = arguments.only or (QUICK_TASKS if arguments.quick else tuple(TASKS))
    command = " ".join(["python -m benchmarks.accuracy", *sys.argv[1:]])
    store = Store(arguments.fresh)
    verdicts = []
    for name in names:
        runner = Runner(TASKS[name], settings, store)
        whole = _measured(runner, latency=name == "resnet56" and not (arguments.quick or arguments.goal))
        _write(runner, command, "quick" if arguments.quick else "goal" if arguments.goal else "full", whole)
        summary.write(RESULTS, TASKS.values())
        verdicts += goals(TASKS[name], runner.records)
        if not whole:
            break
    print(*verdicts, sep="\n")
    return 0


def _measured(runner: Runner, latency: bool) -> bool:
    """Measure a task; False if that was interrupted, and there is only what was measured until then."""
    try:
        runner.everything()
        if latency:
            runner.latency_target(0.5)
    except KeyboardInterrupt:
        return False
    return True


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy")
    parser.add_argument("--quick", action="store_true", help="a part that ends within 15 minutes on two cores")
    parser.add_argument("--goal", action="store_true", help="only the reduction that the goals speak of")
    parser.add_argument("--only", nargs="+", choices=tuple(TASKS), help="these models and no others")
    parser.add_argument("--fresh", action="store_true", help="measure again what an earlier run has measured")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use (default: 1)")
    return parser.parse_args()


def _write(runner: Runner, command: str, extent: str, whole: bool) -> None:
    task, records = runner.task, runner.records
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"accuracy-{task.name}-{extent}"
    content = {
        "command": command,
        "complete": whole,
        "versions": versions(),
        "fingerprints": runner.store.fingerprints,
        "machine": platform.machine(),
        "goals": [str(goal) for goal in goals(task, records)],
        "records": records,
    }
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    plots.curves(task, records, stem.with_suffix(".png"), command)


if __name__ == "__main__":
    raise SystemExit(main())
