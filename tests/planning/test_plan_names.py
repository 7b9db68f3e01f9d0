"""What users call parts of a model by, and which axes go then: those that the named layers put out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).relu())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """A residual stream, which three layers put out: `embed` and each `fc2`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


STREAM, FIRST, SECOND = "embed features", "blocks.0.mlp hidden", "blocks.1.mlp hidden"
WAYS: dict[str, tuple[Any, set[str]]] = {
    "glob of modules": ("*mlp*", {FIRST, SECOND}),
    "glob of layers": ("*fc1*", {FIRST, SECOND}),
    "glob of parameters": ("*.fc1.weight", {FIRST, SECOND}),
    "glob of blocks": ("blocks.*", {FIRST, SECOND}),
    "module": ("blocks.0.mlp", {FIRST}),
    "layer": ("blocks.0.mlp.fc1", {FIRST}),
    "parameter": ("blocks.0.mlp.fc1.weight", {FIRST}),
    "bias": ("blocks.0.mlp.fc1.bias", {FIRST}),
    "axis": (STREAM, {STREAM}),
    "glob of axes": ("* features", {STREAM}),
    "the layer that puts out the stream first": ("embed", {STREAM}),
    "another that does, in full": ("blocks.0.mlp.fc2", {STREAM}),
    "its parameter, in full": ("blocks.1.mlp.fc2.weight", {STREAM}),
    "everything": ("*", {STREAM, FIRST, SECOND}),
    "module object": (lambda net: net.blocks[1].mlp, {SECOND}),
    "layer object": (lambda net: net.blocks[1].mlp.fc1, {SECOND}),
    "parameter object": (lambda net: net.embed.weight, {STREAM}),
    "the model": (lambda net: net, {STREAM, FIRST, SECOND}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_layers_whose_outputs_go(way: str) -> None:
    net = Net()
    key, want = WAYS[way]
    plan = sec.plan(sec.trace(net, torch.zeros(2, 4)), sec.Ratio({key if isinstance(key, str) else key(net): 0.25}))
    assert {axis.name for axis in plan.axes} == want
    assert all(len(axis.keep) == axis.size * 3 // 4 for axis in plan.axes)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("*fc2*", "no axis is what '\\*fc2\\*' puts out: 'embed features' is put out by embed first"),
        ("*norm*", "put out by embed first"),
        ("head", "'embed features' is only read there. Name the layer that puts it out, or the axis"),
        ("fc1", "no axis and no tensor matches 'fc1'"),
        (nn.Linear(1, 1), "this Linear is no part of the model that was traced"),
        (3, "Ratio takes names, globs or modules of the model, not 3"),
    ],
    ids=str,
)
def test_a_name_that_means_no_axis_is_refused_with_what_it_has_to_do_with(key: Any, message: str) -> None:
    graph = sec.trace(Net(), torch.zeros(2, 4))
    with pytest.raises(sec.PlanError, match=message):
        sec.plan(graph, sec.Ratio({key: 0.25}))


PROTECTED: dict[str, tuple[Any, set[str]]] = {
    "module": (lambda net: [net.blocks[0].mlp.fc1], {SECOND}),
    "one module": (lambda net: net.blocks[0].mlp.fc1, {SECOND}),
    "several": (lambda net: (net.blocks[0].mlp.fc1, "blocks.1.mlp.fc1.bias"), {STREAM} - {STREAM}),
    "one name": (lambda net: SECOND, {STREAM, FIRST}),
    "parameter": (lambda net: [net.blocks[0].mlp.fc1.bias], {STREAM, SECOND}),
    "module from another": (lambda net: net.head, {FIRST, SECOND}),
}


@pytest.mark.parametrize("way", PROTECTED)
@pytest.mark.filterwarnings("ignore:the plan cuts nothing")
def test_what_is_protected_stays_whole(way: str) -> None:
    net = Net()
    given, want = PROTECTED[way]
    plan = sec.plan(sec.trace(net, torch.zeros(2, 4)), sec.Ratio(0.25), protect=given(net))
    assert {axis.name for axis in plan.axes} == want


@pytest.mark.parametrize("bad", [3, [3], [None], nn.Linear(2, 2), [nn.Linear(2, 2)]])
def test_what_names_nothing_is_refused(bad: Any) -> None:
    with pytest.raises(sec.PlanError, match="protect"):
        sec.plan(sec.trace(Net(), torch.zeros(2, 4)), sec.Ratio(0.25), protect=bad)


def test_beside_torch_pruning_s_dictionary() -> None:
    """There, `pruning_ratio_dict={mlp: 0.5}` holds for what the layers below a module put out, too, and what nobody
    names gets `pruning_ratio`. Tried with 1.6.1 on this model, it cuts the stream as well, as `fc2` adds to it; here
    the stream is `embed`'s, unless `fc2` is named in full."""
    net = Net()
    sec.apply(net, sec.plan(sec.trace(net, torch.zeros(2, 4)), sec.Ratio({net.blocks[0].mlp: 0.5})))
    assert (net.blocks[0].mlp.fc1.out_features, net.blocks[1].mlp.fc1.out_features, net.embed.out_features) == (
        8,
        16,
        8,
    )
    net = Net()  # where both are named, they agree
    sec.apply(net, sec.plan(sec.trace(net, torch.zeros(2, 4)), sec.Ratio({net.blocks[0].mlp: 0.5, net.embed: 0.25})))
    assert (net.blocks[0].mlp.fc1.out_features, net.blocks[1].mlp.fc1.out_features, net.embed.out_features) == (
        8,
        16,
        6,
    )
