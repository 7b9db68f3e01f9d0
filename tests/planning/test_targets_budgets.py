"""Budgets in bytes, and several at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import secateur as sec
from secateur.planning.amounts import SECONDS
from secateur.planning.targets import Budgets, Bytes, Macs, Params


class Mixed(nn.Module):
    """A body in single precision and an embedding in half: bytes and parameters are not the same budget."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24, dtype=torch.half)
        self.up, self.down = nn.Linear(24, 60), nn.Linear(60, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.embed(x).float()).relu())


@pytest.fixture(scope="module")
def graph() -> sec.Graph:
    torch.manual_seed(0)
    return sec.trace(Mixed(), torch.zeros(5, dtype=torch.long))


def shares(plan: sec.Plan) -> dict[str, float]:
    return {name: (c := getattr(plan, name)).after / c.before for name in ("macs", "params", "bytes")}


@pytest.mark.parametrize("fraction", [0.9, 0.5, 0.2])
def test_bytes(graph: sec.Graph, fraction: float) -> None:
    plan = sec.plan(graph, Bytes(fraction))
    assert fraction - 0.05 <= shares(plan)["bytes"] <= fraction
    model = sec.apply(Mixed(), plan)
    assert plan.bytes.after == sum(p.numel() * p.element_size() for p in model.parameters())


@settings(max_examples=30, deadline=None)
@given(a=st.floats(0.1, 1.0), b=st.floats(0.1, 1.0), c=st.floats(0.1, 1.0))
def test_every_budget_holds_and_one_is_used(graph: sec.Graph, a: float, b: float, c: float) -> None:
    found = shares(sec.plan(graph, Macs(a) & Params(b) & Bytes(c)))
    used = [found["macs"] / a, found["params"] / b, found["bytes"] / c]
    assert max(used) <= 1 + 1e-9
    assert max(used) > 0.85 or found == {"macs": 1.0, "params": 1.0, "bytes": 1.0}


def test_the_tighter_of_two_decides(graph: sec.Graph) -> None:
    assert sec.plan(graph, Macs(0.5) & Macs(0.3)) == sec.plan(graph, Macs(0.3))
    assert sec.plan(graph, Macs(0.3) & Macs(0.5)) == sec.plan(graph, Macs(0.3))
    assert sec.plan(graph, Macs(1.0) & Params(1.0)).axes == ()


def test_the_one_that_cannot_be_reached_is_named(graph: sec.Graph) -> None:
    with pytest.raises(sec.PlanError, match=r"Bytes\(0\.001\) cannot be reached: the lowest is 0\.\d+"):
        sec.plan(graph, Macs(0.9) & Bytes(0.001))


def test_budgets_are_values() -> None:
    both = Macs(0.5) & Params(0.6)
    assert both == Macs(0.5) & Params(0.6)
    assert both != Macs(0.5) & Params(0.7)
    assert repr(both) == "Macs(0.5) & Params(0.6)"
    assert (both & Bytes(0.4)).parts == (Macs(0.5) & (Params(0.6) & Bytes(0.4))).parts
    assert Budgets.of(Macs(0.5), Params(0.6)) == both


@pytest.mark.parametrize("other", [sec.Ratio(0.5), sec.Zeros(), 0.5, None], ids=["Ratio", "Zeros", "number", "None"])
def test_only_budgets_can_be_combined(other: Any) -> None:
    for one in (Macs(0.5), Macs(0.5) & Params(0.6)):
        with pytest.raises(sec.PlanError, match=r"only budgets can be combined, such as Macs\(0\.5\) & Params\(0\.6\)"):
            one & other


@pytest.mark.parametrize("bad", [0, -1, 1.01, float("nan"), "x", True])
def test_bad_bytes_are_refused(bad: Any) -> None:
    with pytest.raises(sec.PlanError, match="Bytes takes a fraction above 0, at most 1"):
        Bytes(bad)


class TestAbsolute:
    def test_numbers_beyond_a_hundred_and_texts_with_units(self, graph: sec.Graph) -> None:
        whole = sec.plan(graph, sec.Ratio(0.0))
        for target in (sec.Params(whole.params.before // 2), sec.Params(f"{whole.params.before / 2000}k")):
            plan = sec.plan(graph, target)
            assert 0.4 * whole.params.before < plan.params.after <= 0.5 * whole.params.before
        assert sec.plan(graph, sec.Macs(whole.macs.before / 2)) == sec.plan(graph, sec.Macs(0.5))
        assert sec.plan(graph, Bytes(f"{whole.bytes.before / 2e3} kB")).bytes.after <= whole.bytes.before / 2
        assert sec.plan(graph, sec.Macs("50%")) == sec.plan(graph, sec.Macs(0.5))

    def test_what_is_met_already_cuts_nothing(self, graph: sec.Graph) -> None:
        assert sec.plan(graph, sec.Macs(1e15)).axes == ()

    @pytest.mark.parametrize("bad", [1.5, 50, 100, "50", "8ms", "200%", "M", "-5M", "1e400", "", None, float("inf")])
    def test_what_could_mean_something_else_is_refused(self, bad: Any) -> None:
        with pytest.raises(sec.PlanError, match="Macs takes a fraction above 0, at most 1, or a number, as in"):
            sec.Macs(bad)

    def test_a_percentage_is_told_how_to_be_written(self) -> None:
        with pytest.raises(sec.PlanError, match=r"for 50% write Macs\(0\.5\)"):
            sec.Macs(50)

    @pytest.mark.parametrize(
        ("said", "means"),
        [
            (0.008, (0.008, True)),
            (0.5, (0.5, False)),
            ("5%", (0.05, False)),
            ("120ms", (0.12, True)),
            (0.1, (0.1, False)),
        ],
    )
    def test_of_times_small_numbers_are_seconds(self, said: Any, means: Any) -> None:
        assert SECONDS.read(said, "Latency") == means

    def test_fractions_on_the_way_to_a_budget_stay_fractions(self) -> None:
        assert sec.Latency(0.5).at(0.05) == sec.Latency("5.0%")
        assert not sec.Latency(0.5).at(0.05).absolute
        assert sec.Macs(0.5).at(0.05) == sec.Macs(0.05)
