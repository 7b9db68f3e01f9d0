"""Cut, score, time and recover: what is measured for one task."""

import copy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch_pruning
from benchmarks.accuracy import peers
from benchmarks.accuracy.cutting import OURS, STAND_INS, TIMELY, Method
from benchmarks.accuracy.store import Record, Store
from benchmarks.accuracy.tasks import Task
from benchmarks.accuracy.timing import side_by_side
from benchmarks.accuracy.training import fit, recover
from torch import nn

import secateur as sec


@dataclass(frozen=True)
class Settings:
    """How much of it all is run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    importances: tuple[str, ...] = ("magnitude L1", "magnitude L2", "FPGM", "Taylor", "Hessian")
    only_goal: bool = False
    tuning: float = 1.0
    timely: bool = True

    def factors(self, task: Task) -> tuple[float, ...]:
        """How many times fewer MACs, or parameters, the task asks for."""
        return (task.goal,) if self.only_goal else task.factors


class Runner:
    """Measures configurations of one task and keeps their records."""

    def __init__(self, task: Task, settings: Settings, store: Store) -> None:
        self.task = task
        self.store = store
        self.settings = settings
        self.records: list[Record] = []
        self._last: tuple[tuple[str, float, int] | None, nn.Module | None, Record] = (None, None, {})

    def everything(self) -> list[Record]:
        """Screen the peers, then take ours and the best of them through the full test, the clock and recovery.

        At the reduction that the goals speak of, with as many seeds as the task has time for; at the others with one
        seed, no recovery, and the three rivals that did best there.
        """
        self.dense()
        goal, seeds = self.task.goal, self.settings.seeds[: self.task.seeds]
        screened = self._screened(self._rivals(), goal)
        for method in (OURS, *screened[:1]):
            for n, seed in enumerate(seeds):
                self.cut(method, goal, seed, full=True)
                if n == 0:
                    self.timed(method, goal)
                if n < self.task.recoveries:
                    self.tuned(method, goal, seed)
                    self.recovered(method, goal, seed)
        if self.settings.timely and self.task.quantity == "MACs":
            self.cut(TIMELY, goal, seeds[0], full=True)
            self.timed(TIMELY, goal)
        for factor in self.settings.factors(self.task):
            if factor != goal:
                for method in (OURS, *self._screened(screened[:3], factor)[:1]):
                    self.cut(method, factor, seeds[0], full=True)
                    self.timed(method, factor)
        return self.records

    def _screened(self, methods: Sequence[Method], factor: float) -> list[Method]:
        """Those of the methods that can do it, the best first."""
        tried = [(self.cut(method, factor, 0, full=False).get("score"), method) for method in methods]
        scored = [(score, method) for score, method in tried if score is not None]
        return [method for _, method in sorted(scored, key=lambda pair: pair[0], reverse=True)]

    def _rivals(self) -> list[Method]:
        """Torch-Pruning's ways; where a local and a global cut both fail, what its criteria would have come to."""
        tried = [self.cut(method, self.task.goal, 0, full=False) for method in peers.methods(("magnitude L2",))[::2]]
        if all("error" in record for record in tried):
            return list(STAND_INS)
        found = peers.methods(self.settings.importances)
        has_statistics = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.task.load().modules())
        return found if has_statistics else [method for method in found if "statistics" not in method.name]

    def dense(self) -> Record:
        """The uncut model's scores."""

        def measure() -> Record:
            model = self.task.load()
            return {
                "score": self.task.score(model, self.task.tests()),
                "cost": self.task.cost(model),
            }

        return self._keep({"stage": "dense", "task": self.task.name}, "torch-pruning", measure)

    def cut(self, method: Method, factor: float, seed: int, full: bool) -> Record:
        """The score right after the cut, on the whole test data or on the part that everything is screened with."""

        def measure() -> Record:
            model, record = self._cut_model(method, factor, seed)
            if model is not None:
                record["score"] = self.task.score(model, self.task.tests() if full else self.task.screen())
                record["reduction"] = self.dense()["cost"] / self.task.cost(model)
            return record

        stage = "cut" if full else "screen"
        return self._keep(self._configuration(stage, method, factor, seed), method.library, measure)

    def tuned(self, method: Method, factor: float, seed: int) -> Record:
        """The score after the task's fine-tuning, which is the same for every method."""
        recipe = replace(self.task.recipe, steps=max(1, round(self.task.recipe.steps * self.settings.tuning)))

        def measure() -> Record:
            model, record = self._cut_model(method, factor, seed)
            if model is not None:
                torch.manual_seed(seed)
                fit(model, self.task.training(seed), self.task.loss, recipe)
                record["score"] = self.task.score(model, self.task.tests())
            return record

        configuration = {**self._configuration("tuned", method, factor, seed), "steps": recipe.steps}
        return self._keep(configuration, method.library, measure)

    def recovered(self, method: Method, factor: float, seed: int) -> Record:
        """The score after `sec.recover` with labels: for every method the same data, steps and choice of a rate."""
        steps = max(10, round(self.task.recipe.steps * self.settings.tuning))

        def measure() -> Record:
            model, record = self._cut_model(method, factor, seed)
            if model is not None:
                found = recover(self.task, model, seed, steps=steps)
                record |= {"held_back": [found.before, found.after]}
                record["score"] = self.task.score(model.eval(), self.task.tests())
            return record

        configuration = {**self._configuration("recovered", method, factor, seed), "steps": steps}
        return self._keep(configuration, method.library, measure)

    def timed(self, method: Method, factor: float) -> Record:
        """Milliseconds, dense beside cut."""

        def measure() -> Record:
            model, record = self._cut_model(method, factor, 0)
            if model is not None:
                inputs = self.task.example(self.task.timed)
                record |= side_by_side(self.task.load(), model, inputs)
                record["reduction"] = self.dense()["cost"] / self.task.cost(model)
                record["threads"] = torch.get_num_threads()
            return record

        return self._keep(self._configuration("timed", method, factor, 0), method.library, measure)

    def latency_target(self, share: float) -> Record:
        """What came of asking for a share of the dense model's time."""

        def measure() -> Record:
            model = self.task.load()
            batch = self.task.example(self.task.timed)
            batches = [inputs for inputs, _ in self.task.calibration(0)]
            try:
                sec.compress(model, batch, sec.Latency(share), batches, timed=False)
            except Exception as error:  # whatever goes wrong is a result
                return {"error": _said(error)}
            came = side_by_side(self.task.load(), model, batch)
            return {**came, "asked": share, "came": 1 / came["speedup"]}

        return self._keep({"stage": "latency", "task": self.task.name, "share": share}, "secateur", measure)

    def _configuration(self, stage: str, method: Method, factor: float, seed: int) -> Record:
        return {
            "stage": stage,
            "task": self.task.name,
            "method": method.name,
            "factor": round(factor, 4),
            "seed": seed,
        }

    def _cut_model(self, method: Method, factor: float, seed: int) -> tuple[nn.Module | None, Record]:
        """A fresh copy of the cut model; the last one made is kept, since several stages want it."""
        key = (method.name, factor, seed)
        if key != self._last[0]:
            model = self.task.load()
            torch.manual_seed(seed)
            started = time.perf_counter()
            try:
                note = method.cut(self.task, model, factor, seed, self._hint(method, factor, seed))
                self._last = key, model, {**note, "seconds": round(time.perf_counter() - started, 1)}
            except Exception as error:  # whatever goes wrong is a result
                self._last = key, None, {"error": _said(error)}
        _, cut, note = self._last
        return copy.deepcopy(cut), dict(note)

    def _hint(self, method: Method, factor: float, seed: int) -> Record:
        """What an earlier cut by the same ranking found: with and without statistics it is the same cut."""
        for record in self.records:
            same = record.get("ranking") == method.ranking and record["factor"] == round(factor, 4)
            if same and (record["seed"] == seed or not method.chance) and "ratio" in record:
                return record
        return {}

    def _keep(self, configuration: Record, library: str, measure: Any) -> Record:
        record = self.store.get(configuration, library, measure)
        if record not in self.records:
            self.records.append(record)
            self._say(self._line(record))
        return record

    def _line(self, record: Record) -> str:
        what = f"{record['task']:<13} {record['stage']:<7} {record.get('factor', ''):<7} {record.get('method', '')}"
        if "error" in record:
            return f"{what}: {record['error'][:150]}"
        if "speedup" in record:
            return f"{what}: {record['dense_ms']:.1f} ms -> {record['cut_ms']:.1f} ms"
        return f"{what}: {self.task.show(record['score'])}"

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def versions() -> dict[str, str]:
    """Of what the figures were made with."""
    return {
        "torch": torch.__version__,
        "torch-pruning": torch_pruning.__version__,
        "secateur": getattr(sec, "__version__", "source"),
    }
