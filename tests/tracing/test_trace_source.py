"""A graph describes the model as it was traced, and says so when the model is another by now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from secateur.planning.problem import CostModel, PruningProblem


class Heads(nn.Module):
    """Attention without softmax, the number of heads in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2)
        self.heads = 3

    def forward(self, x: Tensor) -> Tensor:
        split = self.act(self.first(x)).view(x.shape[0], self.heads, -1)
        return self.last((split * 2).flatten(1))


def traced() -> tuple[Heads, sec.Graph]:
    torch.manual_seed(0)
    net = Heads()
    return net, sec.trace(net, torch.randn(2, 4))


def cut(net: Heads, graph: sec.Graph) -> None:
    sec.apply(net, sec.plan(graph, sec.Ratio(0.34)))


def replaced(net: Heads, graph: sec.Graph) -> None:
    net.last = nn.Linear(12, 3)


def another_kind(net: Heads, graph: sec.Graph) -> None:
    net.act = nn.Softmax(-1)


def gone(net: Heads, graph: sec.Graph) -> None:
    net.last.bias = None


def more(net: Heads, graph: sec.Graph) -> None:
    net.register_buffer("offset", torch.zeros(12))


def attribute(net: Heads, graph: sec.Graph) -> None:
    net.heads = 6


def no_attribute(net: Heads, graph: sec.Graph) -> None:
    del net.heads


def precision(net: Heads, graph: sec.Graph) -> None:
    net.double()


CHANGES: dict[Callable[[Any, Any], None], str] = {
    cut: r"first.weight was float32 \(12, 4\), is float32 \(",
    replaced: r"last.weight was float32 \(2, 12\), is float32 \(3, 12\)",
    another_kind: "act was a ReLU, is a Softmax",
    gone: r"last.bias was float32 \(2,\), is not there",
    more: r"offset was not there, is float32 \(12,\)",
    attribute: "heads was 3, is 6",
    no_attribute: "heads was 3, is not there",
    precision: r"first.weight was float32 \(12, 4\), is float64 \(12, 4\)",
}

ASKED: dict[str, Callable[[sec.Graph], Any]] = {
    "a ratio": lambda graph: sec.plan(graph, sec.Ratio(0.5)),
    "a budget": lambda graph: sec.plan(graph, sec.Macs(0.5)),
    "zeros": lambda graph: sec.plan(graph, sec.Zeros()),
    "latency": lambda graph: sec.plan(graph, sec.Latency(0.5)),
    "a plan that needs no scores": lambda graph: sec.plan(graph, sec.Ratio(0.0)),
    "scores": lambda graph: PruningProblem(graph, sec.Magnitude(), exact=False, protect=(), round_to=1).scores(
        graph.axes[0]
    ),
    "the model": lambda graph: graph.model,
    "a ranking": lambda graph: sec.Isomorphic().compared({a: torch.rand(a.size) for a in graph.axes}, graph),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_has_changed_is_refused_with_the_difference(change: Callable[[Any, Any], None]) -> None:
    net, graph = traced()
    change(net, graph)
    said = rf"^Heads has changed since it was traced \({CHANGES[change]}.*\); trace it anew$"
    with pytest.raises(sec.PlanError, match=said):
        sec.plan(graph, sec.Ratio(0.5))


@pytest.mark.parametrize("name", ASKED)
def test_whatever_goes_back_to_the_model_looks_first(name: str) -> None:
    net, graph = traced()
    cut(net, graph)
    with pytest.raises(sec.PlanError, match="has changed since it was traced"):
        ASKED[name](graph)


def test_training_changes_nothing_that_a_graph_tells() -> None:
    net, graph = traced()
    before = sec.plan(graph, sec.Ratio(0.34))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    net.train()(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    after = sec.plan(graph, sec.Ratio(0.34))
    assert after.macs == before.macs
    assert after == sec.plan(sec.trace(net, graph.example), sec.Ratio(0.34))


def test_what_a_graph_tells_by_itself_is_of_the_model_as_it_was() -> None:
    net, graph = traced()
    before = str(graph), graph.touched(), graph.macs(), CostModel(graph).params({}), CostModel(graph).bytes({})
    cut(net, graph)
    after = str(graph), graph.touched(), graph.macs(), CostModel(graph).params({}), CostModel(graph).bytes({})
    assert after == before
    assert before[3:] == (12 * 4 + 12 + 2 * 12 + 2, 4 * (12 * 4 + 12 + 2 * 12 + 2))


def test_a_model_that_nobody_else_holds() -> None:
    assert sec.plan(sec.trace(Heads(), torch.randn(2, 4)), sec.Ratio(0.34)).axes
