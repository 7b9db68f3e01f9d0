"""Numbers that the traced run did not read follow the sizes that they tell, where there is one way only."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from einops.layers.torch import EinMix, Rearrange, Reduce
from torch import Tensor, nn

import secateur as sec


class Split(nn.Module):
    """As ultralytics' C2f: `forward` halves, another method splits by the width that the constructor stored."""

    def __init__(self, c1: int, c2: int) -> None:
        super().__init__()
        self.c = c2 // 2
        self.cv1, self.cv2 = nn.Conv2d(c1, 2 * self.c, 1), nn.Conv2d(3 * self.c, c2, 1)
        self.m = nn.Conv2d(self.c, self.c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.cv1(x).chunk(2, 1)
        return self.cv2(torch.cat([a, b, b + self.m(b)], 1))

    def forward_split(self, x: Tensor) -> Tensor:
        a, b = self.cv1(x).split((self.c, self.c), 1)
        return self.cv2(torch.cat([a, b, b + self.m(b)], 1))


class Graphed(nn.Module):
    """As PyG's layers: a linear layer below, both sizes beside it."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.lin, self.bias = nn.Linear(in_channels, out_channels, bias=False), nn.Parameter(torch.zeros(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.bias


class Adapted(nn.Module):
    """As a peft layer: the layer below, and a low-rank one beside it."""

    def __init__(self, base: nn.Linear, r: int) -> None:
        super().__init__()
        self.base_layer, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.a = nn.ModuleDict({"default": nn.Linear(base.in_features, r, bias=False)})
        self.b = nn.ModuleDict({"default": nn.Linear(r, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b["default"](self.a["default"](x))

    def add(self, r: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(self.in_features, r), nn.Linear(r, self.out_features))


def cut(net: nn.Module, x: Any, target: Any = None, **options: Any) -> sec.Plan:
    plan = sec.plan(sec.trace(net, x), target or sec.Ratio(0.5), **options)
    sec.apply(net, plan)
    return plan


def test_a_width_that_another_method_reads() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), Split(8, 16), nn.Conv2d(16, 2, 1)).eval()
    x = torch.randn(1, 3, 4, 4)
    plan = cut(net, x)
    assert net[1].c == 4
    assert ("1.c", 8, 4) in [(str(place), was, value) for place, was, value in plan.attributes]
    hidden = net[0](x)
    assert torch.equal(net[1].forward_split(hidden), net[1](hidden))


@pytest.mark.parametrize("sizes", [(8, 12, 6), (8, 8, 8)], ids=["different", "equal"])
def test_the_sizes_of_a_layer_below(sizes: tuple[int, int, int]) -> None:
    a, b, c = sizes
    net = nn.Sequential(nn.Linear(4, a), Graphed(a, b), nn.ReLU(), Graphed(b, c), nn.Linear(c, 2))
    cut(net, torch.randn(3, 4), sec.Ratio({"0": 0.5, "1.lin": 0.25}))
    assert (net[1].in_channels, net[1].out_channels) == tuple(net[1].lin.weight.shape[::-1]) == (a // 2, b - b // 4)
    assert (net[3].in_channels, net[3].out_channels) == (b - b // 4, c)


def test_a_layer_with_an_adapter() -> None:
    net = nn.Sequential(nn.Linear(4, 8), Adapted(nn.Linear(8, 8), 2), nn.ReLU(), nn.Linear(8, 2))
    cut(net, torch.randn(3, 4), sec.Ratio({"0": 0.5, "1.base_layer": 0.25}))
    assert (net[1].in_features, net[1].out_features) == (4, 6)
    assert net[1].add(3)(torch.zeros(1, 4)).shape == (1, 6)


def test_never_where_two_sizes_fit() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden_dim, self.kernel_size, self.width = 8, 8, 7
            self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x).relu()).relu())

    net = Two()
    cut(net, torch.randn(3, 4), sec.Ratio({"a": 0.5, "b": 0.25}))
    assert (net.hidden_dim, net.kernel_size, net.width) == (8, 8, 7)
    net = Two()
    cut(net, torch.randn(3, 4))
    assert (net.hidden_dim, net.kernel_size, net.width) == (4, 8, 7)


def test_saved_loaded_and_undone(tmp_path: Any) -> None:
    def made() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 8), Graphed(8, 12), nn.ReLU(), nn.Linear(12, 2))

    net = made()
    x = torch.randn(3, 4)
    plan = cut(net, x)
    assert sec.Plan.from_json(plan.to_json()) == plan
    sec.save(net, tmp_path / "file")
    fresh = sec.load(tmp_path / "file", made())
    assert (fresh[1].in_channels, fresh[1].out_channels) == (4, 6)
    cut(fresh, x)
    assert (fresh[1].in_channels, fresh[1].out_channels) == (2, 3)


class Heads(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 2)
        self.split, self.join = Rearrange("b n (h d) -> b h n d", h=3), Rearrange("b h n d -> b n (h d)", d=4)
        if kind == "reduce":
            self.join, self.b = Reduce("b h n d -> b n (h)", "mean", d=4), nn.Linear(3, 2)
        if kind == "mix":
            self.b = EinMix("b n (h c) -> b n c2", weight_shape="h c c2", bias_shape="c2", h=3, c=4, c2=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.join(self.split(self.a(x)).relu()))


@pytest.mark.parametrize("kind", ["rearrange", "reduce", "mix"])
def test_a_copy_of_einops_layers_puts_out_the_same(kind: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    net, x = Heads(kind), torch.randn(2, 5, 8)
    plan = sec.plan(sec.trace(net, x), sec.Ratio(0.5))
    assert plan.axes
    sec.apply(net, plan)
    want = net(x)
    assert torch.equal(copy.deepcopy(net)(x), want)
    assert torch.equal(pickle.loads(pickle.dumps(net))(x), want)
    sec.save(net, tmp_path / "file")
    fresh = sec.load(tmp_path / "file", Heads(kind))
    assert torch.equal(copy.deepcopy(fresh)(x), want)
    assert all(dict(m._axes_lengths) == m.axes_lengths for m in net.modules() if isinstance(m, Rearrange | Reduce))
