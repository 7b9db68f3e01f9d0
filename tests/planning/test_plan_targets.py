"""What each target keeps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import secateur as sec

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 12, 3, padding=1), nn.ReLU(),
        nn.Conv2d(12, 20, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, 5),
    )  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> sec.Graph:
    return sec.trace(net(), X)


def sizes(plan: sec.Plan) -> dict[str, int]:
    return {axis.name.split()[0]: len(axis.keep) for axis in plan.axes}


def test_ratio_removes_a_fraction_of_every_axis(graph: sec.Graph) -> None:
    assert sizes(sec.plan(graph, sec.Ratio(0.5))) == {"0": 8, "2": 6, "4": 10}
    assert sizes(sec.plan(graph, sec.Ratio(0.25))) == {"0": 12, "2": 9, "4": 15}
    assert sizes(sec.plan(graph, sec.Ratio(0.3))) == {"0": 12, "2": 9, "4": 14}  # removes whole positions at most
    assert sec.plan(graph, sec.Ratio(0.0)).axes == ()
    assert sec.plan(graph, sec.Ratio(0)).keep == {}


def test_ratio_never_cuts_an_axis_to_nothing(graph: sec.Graph) -> None:
    assert sizes(sec.plan(graph, sec.Ratio(0.999))) == {"0": 1, "2": 1, "4": 1}


def test_ratio_by_glob_the_first_that_matches_counts(graph: sec.Graph) -> None:
    assert sizes(sec.plan(graph, sec.Ratio({"2*": 0.5}))) == {"2": 6}  # not the channels of 0, which it reads
    assert sizes(sec.plan(graph, sec.Ratio({"0 channels": 0.25, "*": 0.5}))) == {"0": 12, "2": 6, "4": 10}
    assert sizes(sec.plan(graph, {"4 channels": 0.5})) == {"4": 10}
    assert sizes(sec.plan(graph, sec.Ratio({"4": 0.5}))) == {"4": 10}  # a module's name


@pytest.mark.parametrize("bad", [1.0, -0.1, float("nan"), float("inf"), "half", True, None, {"*": 1.5}, {"*": "x"}])
def test_bad_ratios_are_refused(bad: Any) -> None:
    with pytest.raises(sec.PlanError, match="Ratio: ratio is a fraction"):
        sec.Ratio(bad)


@pytest.mark.parametrize("target", [sec.Macs, sec.Params])
@pytest.mark.parametrize("bad", [0, -1, 1.01, float("nan"), "x", True])
def test_bad_budgets_are_refused(target: Any, bad: Any) -> None:
    with pytest.raises(sec.PlanError, match=f"{target.__name__} takes a fraction above 0, at most 1"):
        target(bad)


def test_a_glob_that_matches_nothing_is_refused(graph: sec.Graph) -> None:
    with pytest.raises(sec.PlanError, match=r"no axis and no tensor matches 'layer9\.\*'"):
        sec.plan(graph, sec.Ratio({"layer9.*": 0.3}))


@settings(max_examples=30, deadline=None)
@given(fraction=st.floats(0.05, 1.0))
def test_budgets_are_kept(graph: sec.Graph, fraction: float) -> None:
    for target, cost in ((sec.Macs(fraction), "macs"), (sec.Params(fraction), "params")):
        change = getattr(sec.plan(graph, target), cost)
        assert change.after <= change.before * fraction


def test_an_unreachable_budget_says_what_can_be_reached(graph: sec.Graph) -> None:
    with pytest.raises(sec.PlanError, match=r"Macs\(0\.001\) cannot be reached: the lowest is (0\.\d+)") as caught:
        sec.plan(graph, sec.Macs(0.001))
    lowest = float(str(caught.value).split("lowest is ")[1].split(",")[0])
    least = sec.plan(graph, sec.Ratio(0.999)).macs
    assert lowest == pytest.approx(least.after / least.before, abs=1e-3)
    sec.plan(graph, sec.Macs(lowest + 0.001))
    with pytest.raises(sec.PlanError, match=r"cannot be reached: the lowest is 1\.000"):
        sec.plan(graph, sec.Params(0.5), protect=["*"])


def test_a_whole_budget_cuts_nothing(graph: sec.Graph) -> None:
    assert sec.plan(graph, sec.Macs(1.0)).axes == ()


@pytest.mark.parametrize("fraction", [0.8, 0.5, 0.25])
def test_budgets_are_used_up_on_real_models(fraction: float) -> None:
    from torchvision.models import resnet18

    traced = sec.trace(resnet18(), torch.randn(1, 3, 64, 64))
    for target, cost in ((sec.Macs(fraction), "macs"), (sec.Params(fraction), "params")):
        change = getattr(sec.plan(traced, target), cost)
        assert fraction - 0.01 <= change.after / change.before <= fraction


def test_what_is_no_target_or_no_graph_is_refused(graph: sec.Graph) -> None:
    with pytest.raises(sec.PlanError, match="a target is Ratio"):
        sec.plan(graph, 0.5)  # type: ignore[arg-type]
    with pytest.raises(sec.PlanError, match=r"plan: graph is a Graph.*not Sequential"):
        sec.plan(net(), sec.Ratio(0.5))  # type: ignore[arg-type]


def test_anything_that_chooses_is_a_target(graph: sec.Graph) -> None:
    class FirstThree:
        def choose(self, problem: Any) -> dict[Any, Tensor]:
            return {axis: torch.arange(3) for axis in problem.axes}

    assert {axis.keep for axis in sec.plan(graph, FirstThree()).axes} == {(0, 1, 2)}


# keywords -------------------------------------------------------------------------------------------------------


def test_round_to_keeps_multiples(graph: sec.Graph) -> None:
    assert sizes(sec.plan(graph, sec.Ratio(0.5), round_to=4)) == {"0": 8, "2": 8, "4": 12}
    assert sizes(sec.plan(graph, sec.Ratio(0.5), round_to=8)) == {"0": 8, "2": 8, "4": 16}
    assert sizes(sec.plan(graph, sec.Ratio(0.9), round_to=16)) == {"4": 16}  # 16 of 16, 12 of 12: whole
    for axis in sec.plan(graph, sec.Macs(0.4), round_to=4).axes:
        assert len(axis.keep) % 4 == 0


@pytest.mark.parametrize("bad", [0, -8, 1.5, True, "8"])
def test_bad_multiples_are_refused(graph: sec.Graph, bad: Any) -> None:
    with pytest.raises(sec.PlanError, match="round_to is a whole number from 1 on"):
        sec.plan(graph, sec.Ratio(0.5), round_to=bad)


@pytest.mark.parametrize(
    ("protect", "left"),
    [
        (["0.weight"], {"2", "4"}),
        (["0"], {"2", "4"}),
        (["0 channels"], {"2", "4"}),
        (["*.weight"], set()),
        (["2"], {"4"}),  # makes one axis and reads another
        ("7.weight", {"0", "2"}),
        (["7.bias"], {"0", "2", "4"}),  # exists, but nothing of it is cut anyway
        ([], {"0", "2", "4"}),
    ],
)
@pytest.mark.filterwarnings("ignore:the plan cuts nothing")
def test_protect(graph: sec.Graph, protect: Any, left: set[str]) -> None:
    assert set(sizes(sec.plan(graph, sec.Ratio(0.5), protect=protect))) == left


def test_protecting_what_does_not_exist_is_refused(graph: sec.Graph) -> None:
    with pytest.raises(sec.PlanError, match="protect: no tensor and no axis matches 'classifier'"):
        sec.plan(graph, sec.Ratio(0.5), protect=["classifier"])


def test_exact_leaves_other_axes_whole() -> None:
    mixed = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    traced = sec.trace(mixed, torch.randn(3, 4))
    assert [axis.exact for axis in sec.plan(traced, sec.Ratio(0.5)).axes] == [False, True]
    (only,) = sec.plan(traced, sec.Ratio(0.5), exact=True).axes
    assert (only.name, only.exact) == ("2 features", True)


# the plan as a value --------------------------------------------------------------------------------------------


def test_a_plan_is_a_value(graph: sec.Graph) -> None:
    one, two = sec.plan(graph, sec.Ratio(0.5)), sec.plan(sec.trace(net(), X), sec.Ratio(0.5))
    assert one == two
    assert one != sec.plan(graph, sec.Ratio(0.4))
    with pytest.raises(AttributeError):
        one.axes = ()  # type: ignore[misc]
    assert one.to_json() == two.to_json()


def test_planning_changes_nothing(graph: sec.Graph) -> None:
    before = copy.deepcopy(graph.model.state_dict())
    state = torch.get_rng_state()
    sec.plan(graph, sec.Macs(0.5), importance=sec.Random(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in graph.model.state_dict().items())


def test_keep_is_sorted_int64_and_only_what_changes(graph: sec.Graph) -> None:
    keep = sec.plan(graph, sec.Ratio({"0 channels": 0.5})).keep
    assert {name: set(dims) for name, dims in keep.items()} == {"0.weight": {0}, "0.bias": {0}, "2.weight": {1}}
    for index in (keep["0.weight"][0], keep["2.weight"][1]):
        assert index.dtype == torch.int64
        assert torch.equal(index, index.sort().values)
        assert torch.equal(index, keep["0.bias"][0])


def test_the_table_shows_every_axis_and_the_totals(graph: sec.Graph) -> None:
    plan = sec.plan(graph, sec.Ratio(0.5))
    lines = str(plan).splitlines()
    assert lines[0].split() == ["axis", "before", "after", "saves", "MACs", "saves", "params"]
    assert [line.split()[:4] for line in lines[1:4]] == [
        ["0", "channels", "16", "8"], ["2", "channels", "12", "6"], ["4", "channels", "20", "10"],
    ]  # fmt: skip
    assert lines[4] == f"MACs    {plan.macs}"
    assert lines[5] == f"params  {plan.params}"
    assert f"{plan.macs.before:,} → {plan.macs.after:,}" in lines[4]
