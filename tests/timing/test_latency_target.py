"""Latency as a target: predicted, cut, timed, corrected; and said, where nothing is gained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from represented import represented
from secateur.planning.problem import AxisCounts, PruningProblem
from secateur.planning.targets import Params
from secateur.timing import Comparison, Latency, Timing, compare, target
from secateur.timing import clock as timings
from secateur.timing.clock import Clock
from secateur.timing.surface import Bulk, Surface
from secateur.timing.target import Line

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> sec.Graph:
    return sec.trace(net().eval(), X)


def problem(graph: sec.Graph) -> PruningProblem:
    return PruningProblem(graph, sec.Magnitude(), exact=False, protect=(), round_to=1)


class Pretended:
    """A latency model by MACs: a whole run takes a second."""

    def __init__(self, graph: sec.Graph) -> None:
        self.graph = graph

    def __call__(self, counts: Any) -> float:
        return self.graph.macs(counts) / self.graph.macs()

    def saved(self, counts: Any, change: Any) -> float:
        return self(counts) - self({**counts, **change})


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[sec.Graph, Callable[[float], float]], list[float]]:
    """A machine on which the cut model takes `truth(share of the MACs)`; what it was asked to time is listed."""

    def install(graph: sec.Graph, truth: Callable[[float], float]) -> list[float]:
        tried: list[float] = []

        def measured(problem: PruningProblem, counts: AxisCounts) -> Comparison:
            tried.append(problem.macs(counts) / problem.macs({}))
            whole = Timing(1.0, 0.0, 9, 1)
            return Comparison(whole, whole, truth(tried[-1]))

        monkeypatch.setattr(target, "learnt", lambda _: (Pretended(graph), Timing(1.0, 0.0, 9, 1)))
        monkeypatch.setattr(target, "_tried", measured)
        return tried

    return install


def test_a_true_prediction_is_tried_once(graph: sec.Graph, pretend: Any) -> None:
    tried = pretend(graph, lambda share: share)
    found = Latency(0.5).choose(problem(graph)).confirmation
    assert len(tried) == 1
    assert 0.955 * 0.5 <= found.came <= 0.5
    assert found.predicted == found.came
    assert found.asked == 0.5


@pytest.mark.parametrize(
    "truth",
    [
        pytest.param(lambda s: 0.25 + 0.75 * s, id="overhead"),
        pytest.param(lambda s: s**0.5, id="saturates"),
        pytest.param(lambda s: s**2, id="better than thought"),
        pytest.param(lambda s: min(1.0, 1.5 * s), id="steep"),
    ],
)
@pytest.mark.parametrize("asked", represented((0.4, 0.6, 0.8), by=(0.6,)))
def test_a_wrong_prediction_is_corrected(
    graph: sec.Graph, pretend: Any, truth: Callable[[float], float], asked: float
) -> None:
    tried = pretend(graph, truth)
    found = Latency(asked).choose(problem(graph)).confirmation
    assert found.came == pytest.approx(asked, rel=0.05)
    assert 1 < len(tried) <= 4


def test_what_is_chosen_is_what_was_timed(graph: sec.Graph, pretend: Any) -> None:
    tried = pretend(graph, lambda share: 0.25 + 0.75 * share)
    chosen = Latency(0.6).choose(problem(graph))
    kept = problem(graph).macs({axis: len(positions) for axis, positions in chosen.items()})
    assert kept / graph.macs() == pytest.approx(tried[-1])
    plan = sec.plan(graph, Latency(0.6))
    assert {axis.name: axis.keep for axis in plan.axes} == {a.name: tuple(p.tolist()) for a, p in chosen.items()}


@pytest.mark.parametrize(
    ("truth", "says"),
    [(1.3, "is slower"), (1.0, "is no faster"), (0.75, "misses the budget")],
)
def test_no_gain_is_said(graph: sec.Graph, pretend: Any, truth: float, says: str) -> None:
    pretend(graph, lambda _: truth)
    with pytest.warns(sec.SecateurWarning, match=rf"Latency\(0\.6\): the cut model {says} \(asked 60\.0%, predicted .* "
                      rf"came {truth:.1%}"):  # fmt: skip
        Latency(0.6).choose(problem(graph))


def test_what_cannot_be_reached_is_said_at_once(graph: sec.Graph, pretend: Any) -> None:
    tried = pretend(graph, lambda share: share)
    with pytest.raises(sec.PlanError, match=r"Latency\(0\.0002\) cannot be reached: the lowest is 0\.0"):
        Latency(0.0002).choose(problem(graph))
    assert tried == []


def test_a_whole_budget_cuts_nothing(graph: sec.Graph, pretend: Any) -> None:
    tried = pretend(graph, lambda share: share)
    assert Latency(1.0).choose(problem(graph)) == {}
    assert tried == []


def test_other_budgets_hold_beside_it(graph: sec.Graph, pretend: Any) -> None:
    tried = pretend(graph, lambda share: share)
    tight = sec.plan(graph, Params(0.2) & Latency(0.9))
    assert tight.params.after <= 0.2 * tight.params.before
    assert len(tried) == 1  # faster than asked, because of the other
    loose = sec.plan(graph, Params(0.9) & Latency(0.3))
    assert loose.macs.after <= 0.3 * loose.macs.before


class Stairs(Pretended):
    """Channels cost as much as the next multiple of 16."""

    def __call__(self, counts: Any) -> float:
        return super().__call__({atom: -(-n // 16) * 16 for atom, n in counts.items()})


def test_steps_are_used_to_their_end(graph: sec.Graph, pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(graph, lambda share: 0.5)
    monkeypatch.setattr(target, "learnt", lambda _: (Stairs(graph), Timing(1.0, 0.0, 9, 1)))
    assert {len(keep) for keep in Latency(0.5).choose(problem(graph)).values()} <= {16, 32, 48, 64}
    coarse = PruningProblem(graph, sec.Magnitude(), exact=False, protect=(), round_to=12)
    assert {len(keep) % 12 for keep in Latency(0.5).choose(coarse).values()} <= {0}
    params = sec.plan(graph, Latency(0.9) & Params(0.3)).params
    assert 0.28 < params.after / params.before <= 0.3  # no more, even where it costs no time


def test_lines() -> None:
    assert Line.at(whole=3.0, ops=1.0) == Line(1.0, 2.0)
    assert Line.at(whole=1.0, ops=2.0) == Line(0.0, 0.5)
    points = {4.0: 3.0, 2.0: 2.0, 1.0: 1.0}
    assert Line.near(points, 2.5) == Line(1.0, 0.5)  # between the first two
    assert Line.near(points, 1.5) == Line(0.0, 1.0)
    assert Line.near(points, 0.5) == Line(0.0, 1.0)  # beyond the last
    assert Line.near(points, 9.0) == Line(1.0, 0.5)
    stuck = Line.near({4.0: 3.0, 2.0: 3.0}, 1.5)  # no faster: on, but not to nothing
    assert stuck(2.0) == 3.0
    assert stuck(0.5) == 1.5


def test_a_copy_shares_memory_and_the_model_stays_whole(graph: sec.Graph) -> None:
    model = graph.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pairs = list(zip(model.parameters(), target._copy(model).parameters(), strict=True))
    assert all(a is not b and a.data_ptr() == b.data_ptr() for a, b in pairs)
    counts = {axis: axis.size // 2 for axis in graph.axes}
    found = target._tried(problem(graph), counts)
    assert found.before.median > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model[0].out_channels == 64


def test_models_that_cannot_be_copied_or_run_are_refused() -> None:
    class Single(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is only one")

    with pytest.raises(sec.PlanError, match="Sequential cannot be copied: TypeError: there is only one"):
        target._copy(nn.Sequential(Single(2, 2)))
    meta = sec.trace(net().to("meta"), X.to("meta"))
    with pytest.raises(sec.TraceError, match=r"0\.weight is on the meta device"):
        sec.plan(meta, Latency(0.5))


@pytest.mark.parametrize("bad", [0, -1, 1.01, float("nan"), "x", True])
def test_bad_fractions_are_refused(bad: Any) -> None:
    with pytest.raises(sec.PlanError, match="Latency takes a fraction above 0, at most 1"):
        Latency(bad)


# the real thing -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clock(graph: sec.Graph) -> Clock:
    return target.learnt(graph)[0]


def test_the_latency_model(graph: sec.Graph, clock: Clock) -> None:
    """More never takes less, what changes is accounted for, and a graph is timed once."""
    whole = clock({})
    counts = {axis.atom: axis.size for axis in graph.axes}
    assert clock(counts) == pytest.approx(whole)
    for axis in graph.axes:
        times = [clock({axis.atom: n}) for n in range(1, axis.size + 1)]
        assert times == sorted(times)
        assert times[-1] == pytest.approx(whole)
        assert clock.saved(counts, {axis.atom: 8}) == pytest.approx(whole - times[7])
    assert clock({axis.atom: 8 for axis in graph.axes}) < 0.7 * whole
    assert target.learnt(graph)[0] is clock


def test_every_op_counts_as_often_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.same, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.same(self.same(self.first(x).relu()).relu()).relu())

    monkeypatch.setattr(timings, "sample", lambda run, number: 1.0)
    assert Clock.learnt(sec.trace(Again(), torch.zeros(1, 4)))({}) == 4 + 3  # products and rectifiers


def test_nothing_of_the_model_or_the_random_state_changes(graph: sec.Graph) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(2)

    noisy = sec.trace(nn.Sequential(nn.Linear(4, 8), Noisy(8, 2)), torch.zeros(1, 4))
    before, state = copy.deepcopy(graph.model.state_dict()), torch.get_rng_state()
    Clock.learnt(noisy)
    Clock.learnt(graph)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in graph.model.state_dict().items())


def test_ops_that_do_not_run_at_other_sizes_are_scaled() -> None:
    """Two directions of a GRU must be equally wide: by themselves they cannot change."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(4, 32, bidirectional=True), nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0])

    traced = sec.trace(Both(), torch.zeros(6, 2, 4))
    clock = Clock.learnt(traced)
    assert 0 < clock({axis.atom: 8 for axis in traced.axes}) < clock({})
    assert {type(term.surface) for term in clock._terms} == {Surface, Bulk}


def test_a_model_of_mere_overhead_has_nothing_to_gain() -> None:
    tiny = sec.trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4))
    with pytest.raises(sec.PlanError, match=r"Latency\(0\.3\) cannot be reached: the lowest is"):
        sec.plan(tiny, Latency(0.3))


def test_resnet18_meets_its_budget() -> None:
    from torchvision.models import resnet18

    model, x = resnet18().eval(), torch.randn(1, 3, 96, 96)
    graph = sec.trace(model, x)
    for last in (False, True):  # the machine may be busy once
        plan = sec.plan(graph, Latency(0.6))
        ratio = compare(model, sec.apply(copy.deepcopy(model), plan), x).ratio
        if 0.45 < ratio < 0.75 or last:
            break
    assert 0.45 < ratio < 0.75
