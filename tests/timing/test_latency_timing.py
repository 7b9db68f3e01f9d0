"""Measuring models, by a clock that the models themselves move."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from secateur.timing import Timing, compare, latency, measure

X = torch.zeros(2, 4)


class World:
    """The time, and how slow the machine is at the moment."""

    now = 0.0
    slow = 1.0


class Takes(nn.Module):
    """A model that takes so many seconds."""

    def __init__(self, world: World, seconds: float, drift: float = 1.0) -> None:
        super().__init__()
        self.layer, self.world, self.seconds, self.drift = nn.Linear(4, 4), world, seconds, drift

    def forward(self, x: Tensor) -> Tensor:
        self.world.slow *= self.drift
        self.world.now += self.seconds * self.world.slow
        return self.layer(x)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(measure, "clock", lambda: lambda: made.now)
    return made


def test_the_median_and_the_quartiles(world: World) -> None:
    found = latency(Takes(world, 0.01), X)
    assert found.median == pytest.approx(0.01)
    assert found.iqr == pytest.approx(0.0, abs=1e-9)
    assert found.threads == torch.get_num_threads()
    assert found.samples == 100  # a second's worth


@pytest.mark.parametrize(("takes", "samples"), [(1e-4, 200), (0.1, 10), (5.0, 8)])
def test_as_many_samples_as_time_allows(world: World, takes: float, samples: int) -> None:
    found = latency(Takes(world, takes), X)
    assert found.samples == samples
    assert found.median == pytest.approx(takes)


def test_turns_are_fair_to_both_on_a_machine_that_slows_down(world: World) -> None:
    a, b = Takes(world, 0.01, drift=1.02), Takes(world, 0.006, drift=1.02)
    found = compare(a, b, X, seconds=0.01)
    assert found.before.samples == 8
    assert found.ratio == pytest.approx(0.6, rel=0.001)  # though whoever comes second takes 2% longer
    assert found.after.iqr > 0.05 * found.after.median  # by itself, either is all over the place


def test_a_model_is_itself(world: World) -> None:
    model = Takes(world, 0.01)
    assert compare(model, model, X).ratio == pytest.approx(1.0)


def test_real_models() -> None:
    small, large = nn.Linear(256, 64), nn.Linear(256, 4096)
    x = torch.zeros(64, 256)
    assert compare(large, small, x, seconds=0.3).ratio < 0.5
    assert 1e-6 < latency(large, x, seconds=0.2).median < 1


class Counting(nn.Module):
    """Counts its calls in a buffer and in an attribute, and remembers its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout, self.calls = nn.Linear(4, 4), nn.Dropout(0.5), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.calls += 1
        self.seen += 1
        return self.dropout(self.layer(x)) + torch.rand(())


def test_the_model_is_as_it_was() -> None:
    model = Counting().train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    latency(model, X, seconds=0.01)
    assert model.training
    assert model.dropout.training
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_what_cannot_run_is_said() -> None:
    with pytest.raises(sec.TraceError, match=r"weight is on the meta device.*give the model real tensors"):
        latency(nn.Linear(4, 4, device="meta"), X)
    with pytest.raises(sec.TraceError, match=r"Linear could not be run on the example: RuntimeError"):
        latency(nn.Linear(4, 4), torch.zeros(2, 5))
    with pytest.raises(sec.TraceError, match=r"a model is an nn\.Module, not function"):
        latency(lambda x: x, X)  # type: ignore[arg-type]
    with pytest.raises(sec.TraceError, match="could not be run"):
        compare(nn.Linear(4, 4), nn.Linear(5, 4), X)


@pytest.mark.parametrize("example", [X, (X,), [X], {"input": X}], ids=["tensor", "tuple", "list", "dict"])
def test_examples_are_passed_as_everywhere(example: Any) -> None:
    assert latency(nn.Linear(4, 4), example, seconds=0.001).median > 0


def test_one_thread_has_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert measure.clock() is measure.time.thread_time
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert measure.clock() is measure.timer


def test_text() -> None:
    assert str(Timing(1.5, 0.25, 9, 2)) == "1.5 s (quartiles 250 ms apart, 9 samples, 2 threads)"
    assert str(Timing(2e-5, 1e-6, 9, 1)) == "20 µs (quartiles 1 µs apart, 9 samples, 1 thread)"
