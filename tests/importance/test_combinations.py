"""LAMP, sums of criteria and normalisation, with numbers that can be checked by eye."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from importance_models import MODELS, scores, traced
from torch import Tensor, nn

import secateur as sec
from secateur.importance import FPGM, LAMP, Activation, Magnitude, Random, Sum, Taylor
from secateur.importance.scope import normalised


def constant(*values: float) -> Any:
    return lambda context: torch.tensor(values)


def four() -> sec.Graph:
    net = nn.Sequential(nn.Linear(2, 4, bias=False), nn.ReLU(), nn.Linear(4, 1, bias=False))
    net[0].weight.data = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
    net[2].weight.data = torch.tensor([[0.0, 0.0, 4.0, 0.0]])
    return sec.trace(net, torch.zeros(1, 2))


def test_lamp_by_eye() -> None:
    # Squares 1, 4, 9 + 16 = 25, 0: each over the sum of those that are not smaller.
    assert scores(four(), LAMP())["0 features"].tolist() == pytest.approx([1 / 30, 4 / 29, 1.0, 0.0])
    assert scores(four(), LAMP(p=1))["0 features"].tolist() == pytest.approx([1 / 10, 2 / 9, 1.0, 0.0])


@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize("name", MODELS)
def test_lamp_against_its_definition(name: str, p: float) -> None:
    """Lee et al. 2021, eq. 3: sort so that |w_u| <= |w_v| for u < v; score(u) = w_u² / Σ_{v >= u} w_v²."""
    graph = traced(name)
    sizes, got = scores(graph, Magnitude(p)), scores(graph, LAMP(p))
    for axis in graph.axes:
        powers = [size**p for size in sizes[axis.name].tolist()]
        rising = sorted(range(axis.size), key=lambda i: (powers[i], -i))
        for place, position in enumerate(rising):
            want = powers[position] / sum(powers[other] for other in rising[place:])
            assert got[axis.name][position].item() == pytest.approx(want)


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=12))
def test_lamp_keeps_the_order_and_the_largest_scores_one(powers: list[int]) -> None:
    values = torch.tensor(powers, dtype=torch.float64)
    got = LAMP().adapted(values)
    assert torch.equal(got.argsort(descending=True, stable=True), values.argsort(descending=True, stable=True))
    assert got.max() == (1.0 if values.any() else 0.0)
    assert got.min() >= 0


def test_lamp_of_infinite_and_equal_weights() -> None:
    assert LAMP().adapted(torch.tensor([1.0, math.inf, 2.0])).tolist() == [0.0, 1.0, 0.0]
    assert LAMP().adapted(torch.tensor([2.0, 2.0])).tolist() == [1.0, 0.5]  # of equals, the first stays


def test_a_sum_takes_each_term_at_its_mean() -> None:
    both = Sum((constant(1, 2, 3, 2), 1.0), (constant(0, 0, 400, 0), 0.5))
    assert scores(four(), both)["0 features"].tolist() == [0.5, 1.0, 1.5 + 2.0, 1.0]


@pytest.mark.parametrize(
    ("how", "want"),
    [("none", [1, 2, 3, 2]), ("max", [1 / 3, 2 / 3, 1, 2 / 3]), ("sum", [1 / 8, 1 / 4, 3 / 8, 1 / 4])],
)
def test_other_normalisations(how: Any, want: list[float]) -> None:
    got = scores(four(), Sum((constant(1, 2, 3, 2), 1.0), normalise=how))["0 features"]
    assert got.tolist() == pytest.approx(want)


def test_operators_are_sums() -> None:
    a, b, c = Magnitude(), FPGM(), Random(3)
    assert a + 2 * b + c * 0.5 == Sum((a, 1.0), (b, 2.0), (c, 0.5))
    assert a + (b + c) == (a + b) + c
    assert 2 * (a + 3 * b) == Sum((a, 2.0), (b, 6.0))

    def own(context: sec.Context) -> Tensor:
        return torch.arange(context.axis.size)

    assert a + own == Sum((a, 1.0), (own, 1.0))
    assert own + a == Sum((own, 1.0), (a, 1.0))
    graph = four()
    want = normalised(scores(graph, a)["0 features"], "mean") + 2 * normalised(torch.arange(4), "mean")
    assert torch.allclose(scores(graph, a + 2 * Sum((own, 1.0)))["0 features"], want)


def test_a_sum_with_another_normalisation_is_one_term() -> None:
    inner = Sum((constant(1, 2, 3, 2), 1.0), normalise="max")
    assert (inner + Magnitude()).terms[0] == (inner, 1.0)
    assert scores(four(), 2 * inner)["0 features"].tolist() == [1.0, 2.0, 3.0, 2.0]  # at its mean, which is 2/3 of max


@pytest.mark.parametrize("make", [lambda m: m + 1, lambda m: m * "2", lambda m: m * m, lambda m: True * m])
def test_what_cannot_be_added_or_weighed(make: Any) -> None:
    with pytest.raises(TypeError):
        make(Magnitude())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Sum(), "at least one"),
        (lambda: Sum(Magnitude()), "a pair of a criterion and a weight"),  # type: ignore[arg-type]
        (lambda: Sum(("l1", 1.0)), "a pair of a criterion and a weight"),  # type: ignore[arg-type]
        (lambda: Sum((Magnitude(), math.nan)), "finite number, not nan"),
        (lambda: Sum((Magnitude(), True)), "finite number, not True"),
        (lambda: math.inf * Magnitude(), "finite number, not inf"),
        (lambda: Sum((Magnitude(), 1.0), normalise="l2"), "'none', 'mean', 'max', 'sum', not 'l2'"),  # type: ignore
    ],
)
def test_bad_sums(make: Any, said: str) -> None:
    with pytest.raises(sec.PlanError, match=said):
        make()


@pytest.mark.parametrize("bad", [lambda c: torch.zeros(c.axis.size, 1), lambda c: [0.0] * c.axis.size])
def test_a_term_with_bad_scores_is_named(bad: Any) -> None:
    with pytest.raises(sec.PlanError, match=r"must give 0 features 4 scores, not (\(4, 1\)|list)"):
        scores(four(), Magnitude() + bad)


def test_a_term_with_nan_is_refused() -> None:
    with pytest.raises(sec.PlanError, match="NaN"):
        scores(four(), Magnitude() + constant(1, math.nan, 2, 3))


@settings(deadline=None)
@given(
    st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=8),
    st.sampled_from(["mean", "max", "sum"]),
    st.floats(1e-3, 1e3),
)
def test_a_normalised_score_does_not_depend_on_the_unit(values: list[int], how: Any, unit: float) -> None:
    given_scores = torch.tensor(values, dtype=torch.float64)
    one, other = normalised(given_scores, how), normalised(given_scores * unit, how)
    assert torch.allclose(one, other, rtol=1e-6, atol=1e-12)
    assert one.isfinite().all()


def test_zero_and_infinite_scores_when_normalised() -> None:
    assert normalised(torch.zeros(3), "mean").tolist() == [0.0, 0.0, 0.0]
    assert normalised(torch.tensor([1.0, math.inf, 3.0]), "mean").tolist() == [0.5, math.inf, 1.5]
    assert normalised(torch.tensor([math.inf, math.inf]), "max").tolist() == [math.inf, math.inf]


def test_data_criteria_combine_with_others() -> None:
    torch.manual_seed(0)
    graph = four()
    x = torch.rand(5, 2)
    parts = (Magnitude(), Activation([x]), Taylor([x], lambda model, batch: model(batch).sum()))
    got = scores(graph, parts[0] + 2 * parts[1] + 3 * parts[2])["0 features"]
    want = sum(n * normalised(scores(graph, part)["0 features"], "mean") for n, part in enumerate(parts, start=1))
    assert torch.allclose(got, want)
