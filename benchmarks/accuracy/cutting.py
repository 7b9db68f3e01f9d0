"""Ways to make a model smaller, all of one kind: cut in place, down to a budget, from the same calibration data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy.tasks import Task
from torch import nn

import secateur as sec


@dataclass(frozen=True)
class Method:
    """A name, whose library it is, and what cuts.

    `cut(task, model, factor, seed, hint)` returns plain values for the record. A later cut by the same ranking gets
    them as `hint`, so that what was searched for is not searched for again. `chance` says whether the seed matters to
    the ranking.
    """

    name: str
    library: str
    cut: Callable[[Task, nn.Module, float, int, dict[str, Any]], dict[str, Any]]
    ranking: str = ""
    chance: bool = True


def _compress(task: Task, model: nn.Module, factor: float, seed: int, hint: dict[str, Any]) -> dict[str, Any]:
    batches = [inputs for inputs, _ in task.calibration(seed)]
    sec.compress(model, task.example(), task.budget(factor), batches, timed=False)
    return {}


def _timely(task: Task, model: nn.Module, factor: float, seed: int, hint: dict[str, Any]) -> dict[str, Any]:
    """As fast as the goal asks for, too: 80% of the reduction."""
    batches = [inputs for inputs, _ in task.calibration(seed)]
    target = task.budget(factor) & sec.Latency(1 / (0.8 * factor))
    report = sec.compress(model, task.example(task.timed), target, batches, timed=False)
    return {"latency": str(report.plan.confirmation)}


def _plain(importance: Any) -> Callable[..., dict[str, Any]]:
    def cut(task: Task, model: nn.Module, factor: float, seed: int, hint: dict[str, Any]) -> dict[str, Any]:
        graph = sec.trace(model, task.example())
        sec.apply(model, sec.plan(graph, task.budget(factor), importance=importance))
        return {}

    return cut


OURS = Method("sec.compress", "secateur", _compress)
TIMELY = Method("sec.compress, also in measured time", "secateur", _timely)

# Where Torch-Pruning cannot cut a model at all, this is what its criteria would have come to.
STAND_INS = tuple(Method(f"magnitude L{p}, cut by Secateur", "stand-in", _plain(sec.Magnitude(p=p))) for p in (1, 2))
