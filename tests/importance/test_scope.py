"""Scores that can be compared: within an axis, over all axes, over axes that look alike."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import secateur as sec
from oracle import Net
from secateur.importance import Global, Isomorphic, PerAxis, rank
from secateur.importance.scope import SCOPES, signature


def chain(*widths: int, norm: bool = False) -> sec.Graph:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU(), *([nn.BatchNorm1d(after)] if norm and after == 4 else [])]
    return sec.trace(nn.Sequential(*layers[:-1]).eval(), torch.zeros(2, widths[0]))


def given_scores(graph: sec.Graph, *values: list[float]) -> dict[sec.Axis, Tensor]:
    return {axis: torch.tensor(own, dtype=torch.float64) for axis, own in zip(graph.axes, values, strict=True)}


def as_lists(ranked: Any) -> list[list[float]]:
    return [own.tolist() for own in ranked.values()]


def test_each_axis_by_itself() -> None:
    graph = chain(2, 4, 2, 2)
    scores = given_scores(graph, [5.0, 1.0, 9.0, 1.0], [100.0, 200.0])
    assert as_lists(rank(scores, "axis", graph)) == [[0.75, 0.5, 1.0, 0.25], [0.5, 1.0]]
    assert as_lists(rank(scores, PerAxis(), graph)) == as_lists(rank(scores, "axis", graph))


def test_all_axes_together() -> None:
    graph = chain(2, 4, 2, 2)
    scores = given_scores(graph, [5.0, 1.0, 9.0, 1.0], [100.0, 300.0])
    assert as_lists(rank(scores, "global", graph)) == [[1.25, 0.25, 2.25, 0.25], [0.5, 1.5]]
    assert as_lists(rank(scores, Global("none"), graph)) == [[5.0, 1.0, 9.0, 1.0], [100.0, 300.0]]
    assert as_lists(rank(scores, Global("sum"), graph)) == [[5 / 16, 1 / 16, 9 / 16, 1 / 16], [0.25, 0.75]]
    assert as_lists(rank(scores, Global("max"), graph))[1] == [1 / 3, 1.0]


def test_axes_that_look_alike() -> None:
    graph = chain(2, 3, 3, 4, 2, norm=True)  # the third has a norm, the others have none
    first, second, third = graph.axes
    assert signature(first, graph) == signature(second, graph) != signature(third, graph)
    scores = given_scores(graph, [1.0, 5.0, 3.0], [2.0, 6.0, 4.0], [10.0, 40.0, 20.0, 30.0])
    want = [[1 / 6, 5 / 6, 3 / 6], [2 / 6, 6 / 6, 4 / 6], [0.25, 1.0, 0.5, 0.75]]
    assert as_lists(rank(scores, Isomorphic("none"), graph)) == want
    # At their means, 3 and 4: 1/3 < 1/2 < 1 = 1 < 3/2 < 5/3, and the first of equals is the higher.
    assert as_lists(rank(scores, "isomorphic", graph))[:2] == [[1 / 6, 6 / 6, 4 / 6], [2 / 6, 5 / 6, 3 / 6]]


def test_widths_do_not_matter_to_likeness_but_layers_do() -> None:
    graph = chain(2, 3, 5, 7, 2)
    assert len({signature(axis, graph) for axis in graph.axes}) == 1
    convolutions = nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 1, groups=4), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 1, 1)
    )
    graph = sec.trace(convolutions, torch.zeros(1, 1, 2, 2))
    assert len({signature(axis, graph) for axis in graph.axes}) == len(graph.axes) == 2


def test_a_depthwise_convolution_is_no_ordinary_one() -> None:
    parts = {"a": nn.Conv2d(1, 4, 1), "b": nn.Conv2d(1, 4, 1), "c": nn.Conv2d(4, 4, 1), "e": nn.Conv2d(4, 1, 1)}
    net = Net(lambda n, x: n.e(n.d(n.c(n.a(x) + n.b(x)))), d=nn.Conv2d(4, 4, 1, groups=4), **parts)
    graph = sec.trace(net, torch.zeros(1, 1, 2, 2))
    one, two = graph.axes  # two convolutions make each, one reads it
    assert len(one.sites) == len(two.sites)
    assert signature(one, graph) != signature(two, graph)


def test_a_real_resnet_has_few_kinds_of_axes() -> None:
    model = timm.create_model("resnet18", num_classes=10)
    graph = sec.trace(model, torch.zeros(1, 3, 32, 32))
    kinds: dict[Any, list[str]] = {}
    for axis in graph.axes:
        kinds.setdefault(signature(axis, graph), []).append(axis.name)
    assert sorted(map(len, kinds.values())) == [1, 1, 2, 8]  # block-inner; two stages alike; the first; the last
    (inner,) = [names for names in kinds.values() if len(names) == 8]
    assert all(".conv1 " in name for name in inner)


def test_blocks_of_a_transformer_are_alike() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=3, num_classes=5)
    graph = sec.trace(model, torch.zeros(1, 3, 224, 224))
    kinds: dict[Any, list[str]] = {}
    for axis in graph.axes:
        kinds.setdefault(signature(axis, graph), []).append(axis.name)
    alike = [[f"blocks.{i}.{what}" for i in range(3)] for what in ("attn heads", "attn head dims", "mlp hidden")]
    assert sorted(kinds.values()) == sorted([*alike, ["patch_embed.proj channels"]])


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 100), min_size=2, max_size=2), min_size=3, max_size=3), st.sampled_from([*SCOPES])
)
def test_the_order_within_an_axis_stays(values: list[list[int]], scope: str) -> None:
    ranked = rank(given_scores(GRAPH, *values), scope, GRAPH)
    assert list(ranked) == list(GRAPH.axes)
    for own, (one, other) in zip(values, as_lists(ranked), strict=True):
        if own[0] >= own[1]:
            assert one >= other
        else:
            assert one <= other


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), min_size=6, max_size=6), st.integers(1, 5))
def test_a_threshold_takes_the_same_share_of_every_kind(values: list[int], gone: int) -> None:
    ranked = rank(given_scores(GRAPH, values[:2], values[2:4], values[4:]), Isomorphic("none"), GRAPH)
    flat = torch.cat(list(ranked.values()))
    assert int((flat <= gone / 6 + 1e-9).sum()) == gone


GRAPH = chain(2, 2, 2, 2, 2)


def test_scores_are_not_changed_and_may_be_of_any_dtype() -> None:
    graph = chain(2, 4, 2)
    for scope in SCOPES:
        scores = {graph.axes[0]: torch.tensor([3, 1, 2, 0])}
        ranked = rank(scores, scope, graph)[graph.axes[0]]
        assert scores[graph.axes[0]].tolist() == [3, 1, 2, 0]
        assert ranked.dtype == torch.float64
        assert ranked.argsort().tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("bad", ["local", None, 3, Global, {"scope": "axis"}], ids=str)
def test_what_is_no_scope_is_refused(bad: Any) -> None:
    with pytest.raises(sec.PlanError, match="'axis', 'global', 'isomorphic'"):
        rank({}, bad, GRAPH)


@pytest.mark.parametrize("kind", [Global, Isomorphic], ids=lambda k: k.__name__)
def test_what_is_no_normalisation_is_refused(kind: Any) -> None:
    with pytest.raises(sec.PlanError, match="'none', 'mean', 'max', 'sum', not 'l2'"):
        kind("l2")
