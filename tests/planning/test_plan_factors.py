"""A ratio where several axes make up one dimension: heads × dims, groups × channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import secateur as sec
from oracle import Net
from secateur.planning.factors import leading

IDS = {"input_ids": torch.arange(7)[None]}
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 16}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=96, num_key_value_heads=4, head_dim=8)).eval()


@pytest.fixture(scope="module")
def graph() -> sec.Graph:
    return sec.trace(llama(), IDS)


def kept(graph: sec.Graph, target: Any, **options: Any) -> dict[str, int]:
    """What the axes of the attention keep, by the end of their names."""
    plan = sec.plan(graph, target, **options)
    return {a.name.partition("self_attn ")[2]: len(a.keep) for a in plan.axes if "self_attn " in a.name}


def test_axes_of_attention_have_the_names_that_people_use(graph: sec.Graph) -> None:
    named = {axis.name.removeprefix("model.layers.0."): axis.size for axis in graph.axes}
    assert named.items() >= {
        "self_attn kv heads": 4,
        "self_attn query heads per kv head": 4,
        "self_attn rotary pairs": 4,
        "self_attn head dims": 8,
        "mlp hidden": 96,
    }.items()  # fmt: skip


def test_a_ratio_takes_whole_heads(graph: sec.Graph) -> None:
    assert kept(graph, sec.Ratio(0.5)) == {"kv heads": 2}
    plan = sec.plan(graph, sec.Ratio(0.5))
    shapes = {name.rpartition("self_attn.")[2]: [len(k) for k in dims.values()] for name, dims in plan.keep.items()}
    assert (shapes["q_proj.weight"], shapes["k_proj.weight"]) == ([64, 32], [16, 32])


def test_what_is_named_is_cut_and_nothing_else_of_it(graph: sec.Graph) -> None:
    assert kept(graph, {"*per kv head": 0.5}) == {"query heads per kv head": 2}
    assert kept(graph, {"*rotary pairs": 0.5, "*head dims": 0.5}) == {
        "rotary pairs": 2,
        "head dims": 4,
    }
    assert kept(graph, {"model.layers.0.self_attn": 0.5}) == {"kv heads": 2}  # by the layer
    assert kept(graph, {"* *": 0.5}).keys() == {"kv heads", "query heads per kv head", "rotary pairs", "head dims"}


def test_where_kv_heads_are_protected_queries_are_cut_but_not_rotary_pairs(graph: sec.Graph) -> None:
    assert kept(graph, sec.Ratio(0.5), protect=["*kv heads"]) == {"query heads per kv head": 2}
    assert kept(graph, sec.Ratio(0.5), protect=["*heads*"]) == {}  # head_dim tells of both


def test_where_heads_are_protected_dims_are_cut() -> None:
    graph = sec.trace(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), torch.randn(1, 5, 32))
    cut = {axis.name: len(axis.keep) for axis in sec.plan(graph, sec.Ratio(0.5)).axes}
    assert cut == {"self_attn heads": 2, "linear1 features": 32}
    cut = {axis.name: len(axis.keep) for axis in sec.plan(graph, sec.Ratio(0.5), protect=["*heads"]).axes}
    assert cut == {"self_attn head dims": 4, "self_attn value head dims": 4, "linear1 features": 32}


@pytest.mark.parametrize("target", [sec.Params(0.5), sec.Macs(0.5), sec.Params(0.5) & sec.Macs(0.6)], ids=str)
@pytest.mark.parametrize("scope", [None, "axis", "global"])
def test_no_budget_cuts_rotary_pairs(graph: sec.Graph, target: Any, scope: Any) -> None:
    plan = sec.plan(graph, target, scope=scope)
    assert plan.params.after < plan.params.before
    assert not any("rotary" in axis.name for axis in plan.axes)


def test_a_ratio_of_all_positions_together_takes_one_factor_too(graph: sec.Graph) -> None:
    assert kept(graph, sec.Ratio(0.5), scope="global").keys() <= {"kv heads"}


def test_a_budget_by_one_ratio_takes_one_factor_as_long_as_that_is_enough(graph: sec.Graph) -> None:
    assert kept(graph, sec.Params(0.5), scope="axis").keys() == {"kv heads"}
    few = {"protect": ["*mlp*", "*features*"], "scope": "axis"}
    assert kept(graph, sec.Params(0.65), **few).keys() == {"kv heads", "query heads per kv head"}


def test_rounds_take_the_same_factors_as_one_cut() -> None:
    net = llama()
    rounds = {"schedule": sec.schedule.linear(2), "fit": lambda *_: None, "evaluate": lambda _: 1.0}
    sec.iterate(net, IDS, sec.Ratio(0.5), **rounds)
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters() if "self_attn" in name}
    assert set(shapes.values()) == {(64, 32), (16, 32), (32, 64)}


class TestGroups:
    def net(self) -> nn.Module:
        parts = (nn.Conv2d(3, 32, 3), nn.GroupNorm(8, 32), nn.Conv2d(32, 32, 3, groups=4), nn.Conv2d(32, 5, 1))
        return nn.Sequential(*parts)

    def test_channels_go_and_groups_stay(self) -> None:
        plan = sec.plan(sec.trace(self.net(), torch.randn(1, 3, 9, 9)), sec.Ratio(0.5))
        assert {axis.name: (axis.size, len(axis.keep)) for axis in plan.axes} == {
            "0 channels per group": (4, 2),
            "2 channels per group": (8, 4),
        }

    def test_groups_go_where_only_they_are_exact(self) -> None:
        net = self.net()
        plan = sec.plan(sec.trace(net, torch.randn(1, 3, 9, 9)), sec.Ratio(0.5), exact=True)
        assert [len(plan.keep[f"{i}.weight"][0]) for i in (0, 2)] == [16, 16]
        sec.apply(net, plan)

    def test_a_depthwise_layer_with_several_outputs_each_follows_its_input(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3, groups=8), nn.Conv2d(16, 5, 1))
        plan = sec.plan(sec.trace(net, torch.randn(1, 3, 9, 9)), sec.Ratio(0.5))
        assert [len(plan.keep[f"{i}.weight"][0]) for i in (0, 1)] == [4, 8]


def test_a_table_of_the_dims_alone_does_not_ask_for_them_to_be_cut() -> None:
    """As with norms of queries and keys: what counts are matrices."""

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        heads = net.a(x).view(x.shape[0], net.heads, -1) * net.scale
        return net.b(heads.flatten(1))

    net = Net(run, a=nn.Linear(4, 24), b=nn.Linear(24, 3), heads=4, scale=nn.Parameter(torch.ones(6)))
    graph = sec.trace(net, torch.randn(2, 4))
    assert {axis.size for axis in leading(graph, graph.axes)} == {4}


def test_sizes_that_must_agree_are_met_as_near_as_whole_heads_allow() -> None:
    """Three heads of a width that must be heads × dims: two of them stay, and the width follows."""

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.a(x)
        split = net.v(h).view(x.shape[0], net.heads, h.shape[-1] // net.heads)
        return net.b(net.o(split.softmax(1).flatten(1)) + h)

    width = 24
    layers = {name: nn.Linear(width, width) for name in "vo"}
    net = Net(run, a=nn.Linear(4, width), b=nn.Linear(width, 3), heads=3, **layers)
    plan = sec.plan(sec.trace(net, torch.randn(2, 4)), sec.Ratio(0.5))
    assert len(plan.keep["a.weight"][0]) == 16
    assert len(plan.keep["v.weight"][0]) == 16
    sec.apply(net, plan)
