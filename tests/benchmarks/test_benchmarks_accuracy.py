"""The accuracy benchmark's own machinery, on models that take no time and without any download."""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from benchmarks.accuracy import packages, peers, summary
from benchmarks.accuracy.cutting import OURS, Method
from benchmarks.accuracy.data import Split
from benchmarks.accuracy.goals import goals
from benchmarks.accuracy.runner import Runner, Settings
from benchmarks.accuracy.store import Store
from benchmarks.accuracy.tasks import Task, supervised
from benchmarks.accuracy.timing import side_by_side
from benchmarks.accuracy.training import Recipe, draws
from torch import nn


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SECATEUR_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def task() -> Task:
    """Images that are four patterns and some noise, and a small network that has learnt nothing."""
    torch.manual_seed(0)
    y = torch.arange(96) % 4
    x = torch.randn(4, 3, 8, 8)[y] + 0.1 * torch.randn(96, 3, 8, 8)

    def load() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
        ).eval()  # fmt: skip

    split = Split(x[:64], y[:64], x[64:], y[64:])
    return supervised("blobs", load, lambda: split, Recipe(30, 16, 1e-2), n_calibration=32, factors=(2.0,), goal=2.0)


def package(content: bytes, name: str = "thing") -> packages.Package:
    return packages.Package(name, "1.0", "pypi", hashlib.sha256(content).hexdigest(), "none")


def test_a_package_is_read_when_it_hashes_to_its_pin(cache: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "made.zip"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("inside/a.txt", "content")
    pinned = package(wheel.read_bytes(), "good")
    packages.cache("archives", "good-1.0").write_bytes(wheel.read_bytes())
    assert packages.read(pinned, "inside/a.txt") == [b"content"]
    assert (packages.unpacked(pinned, "inside/a.txt") / "a.txt").read_bytes() == b"content"


def test_a_package_with_other_content_is_refused(cache: Path) -> None:
    packages.cache("archives", "bad-1.0").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="pinned is"):
        packages.read(package(b"what was pinned", "bad"), "a.txt")


def test_every_pin_is_a_digest() -> None:
    pinned = [value for value in vars(packages).values() if isinstance(value, packages.Package)]
    assert len(pinned) == 8
    assert all(len(p.sha256) == 64 and p.licence for p in pinned)


def test_draws_take_every_index_once_before_any_comes_again() -> None:
    batches = list(islice(draws(12, 4, seed=3), 6))
    assert sorted(torch.cat(batches[:3]).tolist()) == sorted(torch.cat(batches[3:]).tolist()) == list(range(12))
    assert not torch.equal(torch.cat(batches[:3]), torch.cat(batches[3:]))
    assert len(next(draws(3, 4, seed=0))) == 3


def test_recomputed_statistics_are_those_of_the_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.5)).eval()
    inputs = [torch.randn(50, 5) * 3 + 2 for _ in range(4)]
    peers.recompute_statistics(model, inputs)
    assert isinstance(model[0], nn.BatchNorm1d)
    torch.testing.assert_close(model[0].running_mean, torch.cat(inputs).mean(0))
    torch.testing.assert_close(model[0].running_var, torch.stack([batch.var(0) for batch in inputs]).mean(0))
    assert model[0].momentum == 0.1
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("everywhere", [False, True])
def test_the_peer_is_cut_to_the_same_budget(task: Task, everywhere: bool) -> None:
    method = peers.methods(("magnitude L2",))[2 * everywhere]
    dense, model = task.cost(task.load()), task.load()
    note = method.cut(task, model, 2.0, 0, {})
    assert dense / 2.6 <= task.cost(model) <= dense / 2.0 * 1.01
    again = task.load()
    method.cut(task, again, 2.0, 0, note)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_ratio_that_crashes_is_too_large(task: Task) -> None:
    def attempt(ratio: float) -> nn.Module:
        if ratio > 0.9:
            raise IndexError("nothing is left")
        model = task.load()
        peers._cut_by_ratio(task, model, "magnitude L2", False, ratio, {})
        return model

    ratio, model = peers._search(task, attempt, 4.0)
    assert 0.3 < ratio <= 0.9
    assert task.cost(model) <= task.cost(task.load()) / 4 * 1.01
    with pytest.raises(peers.PeerError, match="down by 1000"):
        peers._search(task, lambda ratio: task.load(), 1000.0)


def test_squared_gradients_are_the_mean_over_single_examples(task: Task) -> None:
    found = peers._squared_gradients(task, task.load(), seed=0, n=3)
    inputs, labels = task.calibration(0)[0]
    model, expected = task.load(), torch.zeros(4, 16)
    for i in range(3):
        model.zero_grad()
        task.loss(model, (inputs[i : i + 1], labels[i : i + 1])).backward()
        assert isinstance(model[-1], nn.Linear)
        assert model[-1].weight.grad is not None
        expected += model[-1].weight.grad ** 2 / 3
    torch.testing.assert_close(found["7.weight"], expected)


def test_patience_ends_a_loop_that_does_not() -> None:
    def wait() -> None:
        with peers.patience(1):
            while True:
                pass

    with pytest.raises(peers.PeerError, match="processor time"):
        wait()


def test_what_was_measured_is_not_measured_again() -> None:
    calls = []

    def measure() -> dict[str, float]:
        calls.append(1)
        return {"score": 1.5}

    first = Store().get({"task": "a", "seed": 0}, "secateur", measure)
    assert Store().get({"task": "a", "seed": 0}, "secateur", measure) == first
    assert len(calls) == 1
    Store().get({"task": "a", "seed": 1}, "secateur", measure)
    fresh = Store(fresh=True)
    for _ in range(2):
        fresh.get({"task": "a", "seed": 0}, "secateur", measure)
    assert len(calls) == 3


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def test_timing_finds_the_ratio() -> None:
    found = side_by_side(Sleeper(0.02), Sleeper(0.005), torch.zeros(1), rounds=3)
    assert 2 < found["speedup"] < 4.5
    assert found["dense_ms"] >= 20


def test_a_run_records_screening_cut_recovery_and_time(task: Task) -> None:
    settings = Settings(seeds=(0, 1), importances=("magnitude L2", "Taylor"), timely=False)
    store = Store()
    records = Runner(task, settings, store).everything()
    stages = [record["stage"] for record in records]
    assert not [record for record in records if "error" in record]
    assert stages.count("screen") == 8
    assert stages.count("cut") == stages.count("tuned") == stages.count("recovered") == 4
    assert stages.count("timed") == 2
    ours = [record for record in records if record.get("method") == OURS.name and record["stage"] == "cut"]
    assert all(record["reduction"] >= 2.0 for record in ours)
    tuned = [record["score"] for record in records if record["stage"] == "tuned"]
    assert min(tuned) > 60  # four classes: training does something
    assert Runner(task, settings, store).everything() == records


def test_a_method_that_fails_is_a_result(task: Task) -> None:
    def fail(*_: object) -> dict[str, object]:
        raise ValueError("no such thing")

    record = Runner(task, Settings(), Store()).cut(Method("broken", "torch-pruning", fail), 2.0, 0, full=False)
    assert record["error"] == "ValueError: no such thing"


def scored(stage: str, method: str, *scores: float, factor: float = 2.1) -> list[dict[str, object]]:
    return [
        {"stage": stage, "task": "resnet56", "method": method, "factor": factor, "seed": seed, "score": score}
        for seed, score in enumerate(scores)
    ]


@pytest.mark.parametrize(
    ("ours", "rival", "verdicts"),
    [
        ((90.0, 92.0), (70.0,), (True, True)),  # the mean 91 loses 2 of 93, a tenth of 23
        ((89.0, 90.0), (70.0,), (False, True)),
        ((90.5,), (85.0,), (True, False)),  # 2.5 is more than a fifth of 8
        ((), (85.0,), (False, False)),
    ],
)
def test_goals_compare_means_over_seeds(
    task: Task, ours: tuple[float, ...], rival: tuple[float, ...], verdicts: tuple[bool, bool]
) -> None:
    resnet = replace(task, name="resnet56", goal=2.1)
    dense: list[dict[str, object]] = [{"stage": "dense", "task": "resnet56", "score": 93.0, "cost": 1}]
    records = [*dense, *scored("cut", OURS.name, *ours), *scored("cut", "a rival", *rival)]
    assert tuple(goal.met for goal in goals(resnet, records)[:2]) == verdicts
    assert all(("MISSED" in str(goal)) != goal.met for goal in goals(resnet, records))


def test_goals_after_recovery_and_on_the_clock(task: Task) -> None:
    dense: list[dict[str, object]] = [{"stage": "dense", "task": "blobs", "score": 93.0, "cost": 1}]
    cut = scored("cut", OURS.name, 91.0)
    for ours, rival, met in ((92.0, 91.5, True), (90.0, 89.0, False), (92.0, 92.5, False)):
        recovered = [*cut, *scored("recovered", OURS.name, ours), *scored("recovered", "a rival", rival)]
        found = goals(replace(task, goal=2.1), [*dense, *recovered])
        assert [goal.met for goal in found if "recover ends" in goal.text] == [met]
    tuned = [*scored("tuned", OURS.name, 92.0), *scored("tuned", "a rival", 92.5)]
    timed = [
        {"stage": "timed", "method": OURS.name, "factor": 2.0, "speedup": 1.7, "reduction": 2.1},
        {"stage": "timed", "method": OURS.name, "factor": 4.0, "speedup": 3.0, "reduction": 4.0},
        {"stage": "latency", "asked": 0.5, "came": 0.53},
    ]
    met = [goal.met for goal in goals(task, [*dense, *tuned, *timed])]
    assert met == [False, False, True, False, False]


def test_the_page_tells_what_the_results_say(tmp_path: Path, task: Task) -> None:
    kept = [{**record, "library": "secateur"} for record in scored("cut", OURS.name, 90.0, 92.0)]
    kept += [{**record, "library": "torch-pruning"} for record in scored("cut", "FPGM", 70.0)]
    kept += [{"stage": "timed", "method": OURS.name, "factor": 2.1, "speedup": 1.8, "library": "secateur"}]
    records = [{"stage": "dense", "task": "resnet56", "score": 93.0}, *kept]
    (tmp_path / "accuracy-resnet56-full.json").write_text(json.dumps({"records": records, "goals": ["met     it"]}))
    summary.write(tmp_path, [replace(task, name="resnet56")])
    page = (tmp_path / "accuracy.md").read_text()
    assert "| resnet56 | 2.10x MACs | 93.00% | 91.00% (2) | 70.00% | – | – | – | – | 1.80x | FPGM |" in page
    assert page.endswith("- met     it\n")
