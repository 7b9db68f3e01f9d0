"""A plan that cuts nothing, or less than was asked, says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import secateur as sec

X = torch.randn(3, 4)


def two_layers(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), *between, nn.ReLU(), nn.Linear(8, 2))


def zeroed(*between: nn.Module) -> nn.Sequential:
    net = two_layers(*between)
    with torch.no_grad():
        net[0].weight[:3], net[0].bias[:3] = 0, 0
        if between:
            between[0].bias.fill_(0.5)
    return net


EMPTY: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "nothing can be cut": (nn.Linear(4, 8), sec.Ratio(0.5), {}, "nothing in Linear can be cut: 2 × a dimension of the"),
    "all is protected": (two_layers(), sec.Ratio(0.5), {"protect": "0"}, "none of the 1 axes may be cut: 1 are protec"),
    "none is exact": (two_layers(nn.LayerNorm(8)), sec.Ratio(0.5), {"exact": True}, "1 are not exact, as exact=True"),
    "less than one": (two_layers(), sec.Ratio(0.1), {}, "0 features keeps 8 of 8, as the ratio of them is less than"),
    "rounding": (two_layers(), sec.Ratio(0.5), {"round_to": 8}, "0 features keeps 8 of 8, as round_to=8 wants"),
    "no zeros": (two_layers(), sec.Zeros(), {}, "no position is zero"),
    "a shift follows": (
        zeroed(nn.BatchNorm1d(8)), sec.Zeros(), {}, "3 of 0 features are zero in 0.weight, but 1.weight and 1.bias"
    ),
    "what is asked for is protected": (
        nn.Sequential(two_layers(), nn.ReLU(), nn.Linear(2, 3)), {"0.0": 0.5}, {"protect": "0.0"}, "0 hidden is prot"
    ),
    "a zero counts": (zeroed(nn.LayerNorm(8)), sec.Zeros(), {}, "are zero in 0.weight, but"),
    "an activation": (zeroed(), sec.Zeros(), {"protect": ["0"]}, "none of the 1 axes may be cut"),
}  # fmt: skip


@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_plan_says_why(case: str) -> None:
    net, target, options, why = EMPTY[case]
    graph = sec.trace(net, X)
    with pytest.warns(sec.SecateurWarning, match="the plan cuts nothing: ") as said:
        plan = sec.plan(graph, target, **options)
    assert not plan.axes
    assert why in plan.why
    assert plan.why in str(said[0].message)
    assert plan.why in str(plan)
    assert sec.Plan.from_json(plan.to_json()).why == plan.why


@pytest.mark.parametrize(
    "target", [sec.Ratio(0.0), sec.Ratio({"*": 0.0}), sec.Macs(1.0), sec.Macs(1.0) & sec.Params(1)]
)
def test_where_nothing_was_asked_there_is_nothing_to_say(target: Any) -> None:
    plan = sec.plan(sec.trace(two_layers(), X), target)
    assert (plan.axes, plan.why) == ((), "")
    assert "why" not in plan.to_json()


def test_less_than_was_asked_is_said_but_not_warned_of() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2))
    plan = sec.plan(sec.trace(net, X), sec.Ratio(0.4), round_to=8)
    assert [axis.name for axis in plan.axes] == ["2 features"]
    assert plan.why == "0 features keeps 8 of 8, as round_to=8 wants"
    assert sec.plan(sec.trace(net, X), sec.Ratio(0.5)).why == ""


def test_a_plan_s_reason_from_elsewhere_must_be_text() -> None:
    plan = sec.plan(sec.trace(two_layers(), X), sec.Ratio(0.5))
    text = plan.to_json()
    with pytest.raises(sec.PlanError, match="why should be str"):
        sec.Plan.from_json(text[:-1] + ',"why":7}')
    assert sec.Plan.from_json(text).why == ""
