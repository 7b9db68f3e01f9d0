"""What one run does not show: a graph is the join over several, and says what none of them showed."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import secateur as sec
from oracle import each_axis


def zeroed(full: nn.Module, plan: sec.Plan) -> nn.Module:
    """The full-size model, with what a plan removes set to zero."""
    named = {**dict(full.named_parameters()), **dict(full.named_buffers())}
    with torch.no_grad():
        for name, dims in plan.keep.items():
            for dim, kept in dims.items():
                gone = torch.ones(named[name].shape[dim], dtype=torch.bool)
                gone[kept] = False
                named[name].index_fill_(dim, gone.nonzero().flatten(), 0.0)
    return full


def right_elsewhere(net: nn.Module, example: Any, *inputs: Any, **keywords: Any) -> sec.Graph:
    """Cut half of what is exact; on other inputs the model must put out what the zeroed one does."""
    net.double().eval()
    example = example.double() if isinstance(example, Tensor) and example.is_floating_point() else example
    full, graph = copy.deepcopy(net), sec.trace(net, example, **keywords)
    plan = sec.plan(graph, sec.Ratio(0.5), exact=True)
    assert plan.keep
    sec.apply(net, plan)
    whole = zeroed(full, plan)
    for given in inputs:
        args = given if isinstance(given, tuple) else (given,)
        args = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        torch.testing.assert_close(net(*args), whole(*args))
    return graph


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.back, self.out = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.back.in_features)
        for t in range(x.shape[1]):
            h = torch.tanh(self.inward(x[:, t]) + self.back(h))
        return self.out(h)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(6, 8), nn.Linear(8, 3)
        self.start = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.start.expand(len(x), -1)
        c = torch.zeros_like(h)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return self.out(h)


class ConvLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Conv2d(2 + 6, 12, 3, padding=1), nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.out.in_channels, *x.shape[-2:])
        for t in range(x.shape[1]):
            a, b = self.gates(torch.cat([x[:, t], h], 1)).chunk(2, 1)
            h = torch.sigmoid(a) * torch.tanh(b)
        return self.out(h)


@pytest.mark.parametrize("kind", [Loop, Cell])
def test_a_recurrence_traced_on_one_step(kind: type[nn.Module]) -> None:
    right_elsewhere(kind(), torch.randn(2, 1, 6), torch.randn(3, 1, 6), torch.randn(3, 5, 6))


def test_a_convolution_fed_back_traced_on_one_step() -> None:
    right_elsewhere(ConvLoop(), torch.randn(1, 1, 2, 8, 8), torch.randn(2, 4, 2, 8, 8))


def test_one_run_alone_does_not_show_the_recurrence() -> None:
    graph = sec.trace(Loop(), torch.randn(2, 1, 6), variants=False)
    assert len(graph.axes) > 1


class OneImage(nn.Module):
    """Written for one image at a time: of two, it runs on and mixes their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = 8
        self.conv, self.out = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).relu().view(self.channels, -1)
        return self.out(h.mean(1))[None]


def test_a_larger_batch_that_the_output_does_not_follow_shows_nothing() -> None:
    graph = sec.trace(OneImage(), torch.randn(1, 3, 6, 6))
    assert [(axis.name, axis.size) for axis in graph.axes] == [("conv channels", 8)]
    right_elsewhere(OneImage(), torch.randn(1, 3, 6, 6), torch.randn(1, 3, 9, 7))


def test_a_cut_is_proved_on_other_sizes_too() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 1, 6)
    assert len(sec.trace(Loop(), x).others) == 1
    net = Loop().eval()
    blind = sec.plan(sec.trace(net, x, variants=False), sec.Ratio(0.5), importance=sec.Random(1))
    with pytest.raises(sec.VerifyError):
        sec.apply(net, dataclasses.replace(blind, others=(torch.randn(3, 5, 6),)))
    sec.apply(net, blind)  # nothing shows at one step


class Kept(nn.Module):
    """A state that one call leaves for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if self.state is not None and self.state.shape == h.shape:
            h = h + self.b(self.state)
        self.state = h.detach()
        return self.out(h)


def test_a_state_that_the_next_call_finds() -> None:
    net, x = Kept().double().eval(), torch.randn(2, 6, dtype=torch.float64)
    full = copy.deepcopy(net)
    plan = sec.plan(sec.trace(net, x), sec.Ratio(0.5), exact=True)
    sec.apply(net, plan)
    whole = zeroed(full, plan)
    for _ in range(3):
        torch.testing.assert_close(net(x), whole(x))


class Longer(nn.Module):
    """Only longer inputs take the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.long, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if x.shape[1] > 4:
            h = torch.relu(self.long(h))
        return self.out(h).mean(1)


def test_a_branch_that_only_longer_inputs_take() -> None:
    right_elsewhere(Longer(), torch.randn(2, 4, 6), torch.randn(2, 9, 6), torch.randn(2, 1, 6))


class Trained(nn.Module):
    """Noise of a literal width and a mean that only training sees."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.c = nn.Linear(6, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h, g = self.a(x), self.c(x)
        if self.training:
            h = h + torch.randn(x.shape[0], 8)
            self.mean.lerp_(g.detach().mean(0), 0.1)
        return self.b(torch.relu(h) * torch.relu(g))


def test_what_only_training_runs() -> None:
    net = Trained()
    graph = sec.trace(net, torch.randn(2, 6))
    assert any("literal at test_trace_runs.py" in blocked.reason for blocked in graph.blocked)
    alone = sec.trace(net, torch.randn(2, 6), variants=False)  # no run in training mode, but the source reads a buffer
    assert not alone.axes
    assert any("reads mean, which has 8, too" in blocked.reason for blocked in alone.blocked)


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.one, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if x.sum() > 100:
            h = self.norm(h)
        return self.out(torch.relu(self.one(h)) if x.mean() > 0 else h)


def test_what_data_decides_is_seen_both_ways() -> None:
    x = torch.randn(2, 6)
    graph = right_elsewhere(Decides(), x, x, -x, x + 100, x - 100)
    assert not graph.unseen


class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.a(x))) * (2 if x.mean().item() > 0 else 3)


def test_a_number_read_from_data_is_said_with_its_line() -> None:
    graph = right_elsewhere(Read(), torch.randn(2, 6), torch.randn(5, 6))
    (unseen,) = graph.unseen
    assert "read from data" in unseen.what
    assert unseen.where.startswith("test_trace_runs.py:")
    assert str(unseen) in str(graph)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.emb, self.gate, self.out = nn.Linear(4, 8), nn.Linear(4, count), nn.Linear(8, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        h, best = self.emb(x), self.gate(x).argmax(-1)
        y = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            if (best == i).any():
                y[best == i] = expert(h[best == i])
        return self.out(y + h)


@pytest.mark.parametrize("count", [3, 24])
def test_experts_that_the_example_does_not_reach(count: int) -> None:
    torch.manual_seed(0)
    graph = right_elsewhere(Experts(count), torch.randn(1, 4), torch.randn(200, 4) * 5)
    assert any(axis.name == "emb features" for axis in graph.axes)


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.deep, self.head, self.other = (nn.Linear(*n) for n in ((6, 8), (8, 10), (10, 3), (8, 5)))

    def forward(self, x: Tensor, other: bool | None = None) -> Tensor:
        h = torch.relu(self.a(x))
        return self.other(h) if other else self.head(torch.relu(self.deep(h)))


def test_a_layer_that_no_run_reached_is_cut_along_where_only_one_axis_fits() -> None:
    x = torch.randn(2, 6)
    graph = right_elsewhere(Switched(), x, (x,), (x, True))
    assert {site.tensor for site in graph.axes[0].sites} >= {"a.weight", "other.weight"}
    assert any("other: no run reached it" in unseen.what for unseen in graph.unseen)
    assert any("given other" in unseen.what for unseen in graph.unseen)


class Flagged(Switched):
    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        return super().forward(x, other)


def test_what_a_flag_switches_to_is_seen_and_its_output_stays() -> None:
    x = torch.randn(2, 6)
    graph = right_elsewhere(Flagged(), x, (x,), (x, True))
    assert {site.tensor for site in graph.axes[0].sites} >= {"a.weight", "other.weight"}
    assert not graph.unseen


class Ambiguous(Switched):
    def __init__(self) -> None:
        super().__init__()
        self.deep, self.head = nn.Linear(8, 8), nn.Linear(8, 3)


def test_where_several_fit_they_are_cut_as_one_and_a_further_example_frees_them() -> None:
    x = torch.randn(2, 6)
    (axis,) = right_elsewhere(Ambiguous(), x, (x,), (x, True)).axes
    assert {site.tensor for site in axis.sites} >= {"a.weight", "deep.weight", "head.weight", "other.weight"}
    seen = right_elsewhere(Ambiguous(), sec.Examples((x.double(),), (x.double(), True)), (x,), (x, True))
    assert len(seen.axes) == 2
    assert not seen.unseen


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        return SimpleNamespace(out=self.b(h), inner=SimpleNamespace(deep=[SimpleNamespace(features=h)]))


def test_outputs_deep_inside_of_objects_keep_their_size() -> None:
    assert not sec.trace(Nested(), torch.randn(2, 6)).axes


@pytest.mark.parametrize("examples", [(), (torch.zeros(1, 3),)])
def test_examples_that_are_none(examples: Any) -> None:
    with pytest.raises(sec.TraceError):
        sec.trace(nn.Linear(2, 2), sec.Examples(*examples))


NUMBERS = {
    "float / size": lambda h: 4.0 / h.shape[-1],
    "size / float": lambda h: h.shape[-1] / 4.0,
    "float * size": lambda h: 0.5 * h.shape[-1],
    "float ** size": lambda h: 1.5 ** -h.shape[-1],
    "numel of a shape": lambda h: h.shape.numel() / 2,
    "len": lambda h: len(h[0]) * 1.0,
    "logarithm": lambda h: math.log(h.shape[-1]),
    "a float of NumPy": lambda h: float(np.float64(4.0) / h.shape[-1]),
    "a function of NumPy": lambda h: float(np.sqrt(h.size(1))),
    "text": lambda h: float(f"{h.shape[-1]}"),
    "in a tensor": lambda h: torch.tensor(2.0 / h.shape[1]),
    "filled in": lambda h: torch.full((1,), 1.0 / h.shape[1]),
}


class Scaled(nn.Module):
    def __init__(self, number: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 12), nn.Linear(12, 3)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.c(self.b(h) * self.number(h))


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_size_that_becomes_a_number_is_not_exact_and_follows_the_cut(kind: str) -> None:
    net, x = Scaled(NUMBERS[kind]).eval(), torch.randn(2, 6)
    graph = sec.trace(net, x)
    exact = {axis.name: axis.exact for axis in graph.axes}
    assert exact == {"a features": False, "b features": True}
    assert "test_trace_runs.py:" in graph.axes[0].why
    sec.apply(net, sec.plan(graph, sec.Ratio(0.5)))
    net(x)


@pytest.mark.parametrize("number", [lambda h: 4.0, lambda h: 4.0 / h.shape[0]])
def test_other_numbers_are_exact(number: Any) -> None:
    assert all(axis.exact for axis in sec.trace(Scaled(number), torch.randn(2, 6)).axes)


RUNS = itertools.count()


class Counted(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        next(RUNS)
        return super().forward(x) if self.number is not None else self.c(self.b(self.a(x)) * math.sqrt(2.0 / math.pi))


@pytest.mark.parametrize(
    ("number", "more"),
    [
        (None, 0),
        (lambda h: h.shape[-1] ** -0.5, 0),
        (lambda h: math.log(h.shape[-1] / 4), 0),
        (lambda h: 4.0 / h.shape[-1], 3),  # with both axes halved, and with each alone
    ],
    ids=["made of constants", "made by a size", "made of what a size made", "of unknown origin"],
)
def test_the_model_runs_once_more_for_numbers_of_unknown_origin(number: Any, more: int) -> None:
    x, first = torch.randn(2, 6), next(RUNS)
    sec.trace(Counted(lambda h: h.shape[0] * 1.0), x)
    usual, first = next(RUNS) - first, next(RUNS)
    sec.trace(Counted(number), x)
    assert next(RUNS) - first - 1 == usual - 1 + more


def test_attention_with_a_mask_is_seen_where_the_example_has_none() -> None:
    """Transformers repeats keys and values itself where there is a mask, and leaves it to torch where there is none."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=3)).eval()
    words = torch.arange(8).reshape(2, 4)
    graph = sec.trace(model, {"input_ids": words})
    sec.apply(model, sec.plan(graph, each_axis(graph, 0.5)))
    assert model.model.layers[0].self_attn.k_proj.out_features == 8
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert bool(model(input_ids=words, attention_mask=mask).logits.isfinite().all())
