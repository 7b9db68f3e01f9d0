"""Criteria against a plain loop over positions, elements and sites."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from importance_models import MODELS, gone_with, scores, traced
from torch import Tensor, nn

import secateur as sec
from oracle import Net
from secateur.importance import FPGM, JointCriterion, Magnitude, Weights
from secateur.importance.weights import slice_sums


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("name", MODELS)
def test_magnitude_is_the_norm_of_everything_that_goes(name: str, p: float) -> None:
    graph = traced(name)
    parameters = dict(graph.model.named_parameters())
    got = scores(graph, sec.Magnitude(p))
    for axis in graph.axes:
        for position in range(axis.size):
            total = 0.0
            for tensor, slices in gone_with(graph, axis, position).items():
                for dim, gone in slices:
                    for index in gone:
                        total += sum(abs(v) ** p for v in parameters[tensor].select(dim, index).flatten().tolist())
            assert got[axis.name][position].item() == pytest.approx(total ** (1 / p), rel=1e-5), (axis.name, position)


@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize("name", ["residual", "concat", "grouped", "tied"])
def test_fpgm_sums_distances_between_what_makes_positions(name: str, p: float) -> None:
    graph = traced(name)
    parameters = dict(graph.model.named_parameters())
    got = scores(graph, sec.FPGM(p))
    for axis in graph.axes:
        want = torch.zeros(axis.size, dtype=torch.float64)
        makers = [s for s in axis.sites if s.dim == 0] or list(axis.sites)
        for site in makers:
            if site.tensor not in parameters or parameters[site.tensor].ndim < 2:
                continue
            rows = []
            for position in range(axis.size):
                gone = dict(gone_with(graph, axis, position)[site.tensor])[site.dim]
                rows.append(torch.cat([parameters[site.tensor].select(site.dim, i).flatten() for i in gone]).double())
            for i, row in enumerate(rows):
                want[i] += sum((row - other).abs().pow(p).sum().pow(1 / p) for other in rows)
        assert torch.allclose(got[axis.name], want, rtol=1e-6), axis.name


def test_numbers_that_can_be_checked_by_eye() -> None:
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
    net[0].weight.data = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    net[2].weight.data = torch.tensor([[4.0, 0.0, 0.0]])
    graph = sec.trace(net, torch.zeros(1, 2))
    assert scores(graph, sec.Magnitude())["0 features"].tolist() == [5.0, 1.0, 1.0]
    assert scores(graph, sec.Magnitude(1))["0 features"].tolist() == [7.0, 1.0, 1.0]
    ten = 10**0.5
    assert scores(graph, sec.FPGM())["0 features"].tolist() == pytest.approx([2 * ten, ten + 2, ten + 2])
    assert sec.plan(graph, sec.Ratio(0.4)).axes[0].keep == (0, 1)  # of equals, the first stays


def test_bn_scale_sums_the_scales_of_an_axis() -> None:
    parts = {"a": nn.Conv2d(3, 4, 1), "n": nn.BatchNorm2d(4), "m": nn.BatchNorm2d(4), "c": nn.Conv2d(4, 2, 1)}
    net = Net(lambda n, x: n.c(n.n(n.a(x)) + n.m(n.a(x))), **parts)
    net.n.weight.data = torch.tensor([1.0, -2.0, 0.0, 0.5])
    net.m.weight.data = torch.tensor([-1.0, 1.0, 0.25, 0.0])
    graph = sec.trace(net, torch.randn(1, 3, 4, 4))
    assert scores(graph, sec.BNScale())["a channels"].tolist() == [2.0, 3.0, 0.25, 0.5]


def test_bn_scale_falls_back_to_magnitude() -> None:
    graph = traced("grouped")
    theirs, ours = scores(graph, sec.BNScale()), scores(graph, sec.Magnitude())
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_random_is_the_same_for_the_same_seed_and_differs_between_seeds_and_axes() -> None:
    graph = traced("grouped")
    one, two, other = (scores(graph, sec.Random(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    same_size = [v for v in one.values() if len(v) == 4]
    assert all((v >= 0).all() and (v < 1).all() for v in one.values())
    assert len(same_size) < 2 or not torch.equal(same_size[0], same_size[1])


def test_chunked_sums_of_large_tensors_are_the_plain_sums() -> None:
    weight = torch.randn(700, 3, 500, generator=torch.Generator().manual_seed(0))
    for dim in range(3):
        rows = weight.double().movedim(dim, 0).flatten(1)
        assert torch.allclose(slice_sums(weight, (dim,), Magnitude().powers)[dim], rows.square().sum(1), rtol=1e-5)
        assert torch.allclose(slice_sums(weight, (dim,), Magnitude(1).powers)[dim], rows.abs().sum(1), rtol=1e-5)
    rows = weight[:, :, 0].double()
    plain = (rows[:, None] - rows[None]).norm(dim=-1).sum(1)
    assert torch.allclose(FPGM().distances(weight[:, :, 0]), plain, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_summed_in_high(dtype: torch.dtype) -> None:
    weight = torch.full((2, 40_000), 3.0, dtype=dtype)
    assert slice_sums(weight, (0,), Magnitude().powers)[0].tolist() == [360_000.0, 360_000.0]


def test_a_function_is_a_criterion() -> None:
    def last_matter_most(context: sec.Context) -> Tensor:
        assert context.axis.sites[0].tensor in context.parameters
        return torch.arange(context.axis.size)

    (axis,) = sec.plan(traced("residual"), sec.Ratio(0.5), importance=last_matter_most).axes
    assert axis.keep == (3, 4, 5)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda c: torch.zeros(c.axis.size + 1), r"must be a tensor of 6 scores, not \(7,\)"),
        (lambda c: torch.zeros(c.axis.size, 1), r"must be a tensor of 6 scores, not \(6, 1\)"),
        (lambda c: [0.0] * c.axis.size, "must be a tensor of 6 scores, not list"),
        (lambda c: torch.full((c.axis.size,), float("nan")), "has NaN scores"),
    ],
)
def test_bad_scores_are_refused(made: Any, said: str) -> None:
    with pytest.raises(sec.PlanError, match=said):
        sec.plan(traced("residual"), sec.Ratio(0.5), importance=made)


def test_what_is_no_criterion_is_refused() -> None:
    with pytest.raises(sec.PlanError, match="importance is a function of a Context"):
        sec.plan(traced("residual"), sec.Ratio(0.5), importance="l1")  # type: ignore[arg-type]


@pytest.mark.parametrize("criterion", [sec.Magnitude(), sec.FPGM(), sec.BNScale()], ids=lambda c: type(c).__name__)
def test_nan_weights_are_refused_with_their_name(criterion: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].weight.data[1, 1] = float("nan")
    with pytest.raises(sec.PlanError, match=r"0 features has NaN scores: are there NaN weights in 0\.weight"):
        sec.plan(sec.trace(net, torch.zeros(1, 3)), sec.Ratio(0.5), importance=criterion)


def test_infinite_weights_matter_most() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].weight.data[2, 0] = float("inf")
    assert 2 in sec.plan(sec.trace(net, torch.zeros(1, 3)), sec.Ratio(0.75)).axes[0].keep


def test_criteria_read_weights_and_change_nothing() -> None:
    graph = traced("residual")
    before = {k: v.clone() for k, v in graph.model.state_dict().items()}
    for criterion in (sec.Magnitude(), sec.FPGM(), sec.BNScale(), sec.Random(0)):
        sec.plan(graph, sec.Ratio(0.5), importance=criterion)
    assert all(torch.equal(before[k], v) for k, v in graph.model.state_dict().items())


def test_a_function_may_ask_a_criterion_that_scores_all_axes_at_once() -> None:
    graph, asked = traced("concat"), []

    class Counted(JointCriterion):
        def scores(self, weights: Weights) -> dict[sec.Axis, Tensor]:
            asked.append([axis.name for axis in weights.axes])
            return weights.sum(torch.square)

    criterion = Counted()
    got = scores(graph, lambda context: criterion(context).sqrt())
    assert asked == [[axis.name for axis in graph.axes]]
    want = scores(graph, sec.Magnitude())
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_each_parameter_is_passed_over_once() -> None:
    graph, seen = traced("tied"), []

    def sums(name: str, parameter: Tensor, dims: Any) -> dict[int, Tensor]:
        seen.append((name, tuple(dims)))
        return {}

    Weights(graph, graph.axes).gather(sums)
    assert [name for name, _ in seen] == ["first.weight", "first.bias", "a.weight", "a.bias", "last.weight"]
    assert dict(seen)["a.weight"] == (0, 1)
