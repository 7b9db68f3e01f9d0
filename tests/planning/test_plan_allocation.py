"""Budgets are spent where they cost the least importance."""

from __future__ import annotations

import itertools

import pytest
import timm
import torch
from torch import nn

import secateur as sec
from secateur.errors import PlanError
from secateur.planning.allocation import Limit, allocate, ladder
from secateur.planning.problem import CostModel, CountedCost


def chain(*widths: int):
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return sec.trace(nn.Sequential(*layers), torch.zeros(1, widths[0]))


def test_close_to_the_best_of_all_choices() -> None:
    graph = chain(4, 6, 5, 7, 3)
    whole, floor = graph.macs(), graph.macs({axis.atom: 1 for axis in graph.axes})
    choices = list(itertools.product(*(range(1, axis.size + 1) for axis in graph.axes)))
    costs = [graph.macs({axis.atom: n for axis, n in zip(graph.axes, one, strict=True)}) for one in choices]
    cost = CountedCost(CostModel(graph).macs)
    shares = []
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        limit = floor + (whole - floor) * float(torch.rand((), generator=generator))
        scores = {axis: torch.rand(axis.size, generator=generator).double() for axis in graph.axes}
        kept = [[0.0, *own.sort(descending=True).values.cumsum(0).tolist()] for own in scores.values()]
        ladders = [ladder(axis, scores[axis], 1, 1) for axis in graph.axes]
        assert allocate(ladders, [Limit("Macs", cost, floor - 1)]) is None
        found = allocate(ladders, [Limit("Macs", cost, limit)])
        assert found is not None
        counts = found.counts
        assert cost(counts) <= limit
        fitting = [one for one, price in zip(choices, costs, strict=True) if price <= limit]
        best = max(sum(own[n] for own, n in zip(kept, one, strict=True)) for one in fitting)
        shares.append(sum(own[counts[axis]] for own, axis in zip(kept, graph.axes, strict=True)) / best)
    assert min(shares) > 0.93
    assert sum(shares) / len(shares) > 0.998


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "vit_tiny_patch16_224",
        "mobilenetv3_small_050",
        pytest.param("densenet121", marks=pytest.mark.slow),
    ],
)
def test_within_one_per_cent_on_real_models(name: str) -> None:
    graph = sec.trace(timm.create_model(name), torch.zeros(1, 3, 224, 224), variants=False)
    for fraction in (0.75, 0.5, 0.25):
        for target, change in ((sec.Macs(fraction), "macs"), (sec.Params(fraction), "params")):
            made = getattr(sec.plan(graph, target), change)
            assert 0.99 * fraction <= made.after / made.before <= fraction, (target, made)


def test_several_budgets_hold_at_once() -> None:
    graph = sec.trace(timm.create_model("resnet18"), torch.zeros(1, 3, 64, 64))
    made = sec.plan(graph, sec.Macs(0.5) & sec.Params(0.4))
    assert made.macs.after <= 0.5 * made.macs.before
    assert made.params.after <= 0.4 * made.params.before
    assert made.macs.after >= 0.495 * made.macs.before or made.params.after >= 0.396 * made.params.before


def test_scores_in_a_common_unit_move_the_cut_to_where_it_costs_least() -> None:
    graph = chain(8, 16, 16, 8)

    class Known(sec.Criterion):
        comparable = True

        def __call__(self, context):
            return torch.full((context.axis.size,), 1.0 if context.axis is graph.axes[0] else 100.0)

    made = {axis.name: len(axis.keep) for axis in sec.plan(graph, sec.Macs(0.6), importance=Known()).axes}
    assert list(made) == [graph.axes[0].name]


def test_a_scope_of_each_axis_cuts_all_by_one_ratio() -> None:
    graph = chain(8, 40, 80, 8)
    made = sec.plan(graph, sec.Macs(0.25), scope="axis", importance=sec.Random(0))
    shares = [len(axis.keep) / axis.size for axis in made.axes]
    assert max(shares) - min(shares) < 0.06


def test_a_ratio_with_a_global_scope_removes_that_share_of_all_positions() -> None:
    graph = chain(8, 40, 80, 8)
    made = sec.plan(graph, sec.Ratio(0.5), scope="global", importance=sec.Random(0))
    assert sum(axis.size - len(axis.keep) for axis in made.axes) == 60


def test_multiples_are_kept() -> None:
    graph = sec.trace(timm.create_model("resnet18"), torch.zeros(1, 3, 64, 64))
    made = sec.plan(graph, sec.Macs(0.5), round_to=16)
    assert all(len(axis.keep) % 16 == 0 for axis in made.axes)
    assert 0.4 * made.macs.before <= made.macs.after <= 0.5 * made.macs.before


def test_unknown_scopes_are_refused() -> None:
    with pytest.raises(PlanError, match="scope"):
        sec.plan(chain(4, 6, 3), sec.Macs(0.5), scope="everywhere")


def test_where_nothing_may_be_cut_a_budget_that_holds_asks_for_nothing() -> None:
    assert sec.plan(chain(4, 3), sec.Macs(1.0)).axes == ()
