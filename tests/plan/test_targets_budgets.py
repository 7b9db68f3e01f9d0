"""Budgets in bytes, and several at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import secateur as sec
from secateur.plan.targets import Budgets, Bytes, Macs, Params


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
    assert repr(both) == "Macs(fraction=0.5) & Params(fraction=0.6)"
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
