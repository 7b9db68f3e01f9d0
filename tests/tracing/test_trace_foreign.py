"""Sparse products, and gradients inside of forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import secateur as sec

ADJACENT = torch.eye(10) + torch.eye(10).roll(1, 0)
ADJACENT[4] = 0  # a node without neighbours


class Neighbours(nn.Module):
    """A layer of a graph network."""

    def __init__(self, mix: Callable[[Tensor, Tensor], Tensor], adjacent: Tensor, share: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("adjacent", adjacent)
        self.mix, self.share = mix, share

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.adjacent, self.first(x)).relu()
        return self.last(x / (1 + x.mean(-1, keepdim=True)) if self.share else x)


MIXES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sparse.mm": torch.sparse.mm,
    "mm": torch.mm,
    "@": lambda a, x: a @ x,
    "addmm": lambda a, x: torch.sparse.addmm(x, a, x),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("share", [False, True], ids=["exact", "inexact"])
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
@pytest.mark.parametrize("mix", MIXES)
def test_sparse_products(mix: str, kind: str, share: bool) -> None:
    net, x = Neighbours(MIXES[mix], getattr(ADJACENT, kind)(), share), torch.randn(10, 6)
    graph = sec.trace(net, x)
    assert [(axis.size, axis.exact) for axis in graph.axes] == [(8, not share)]
    sec.apply(net, sec.plan(graph, sec.Ratio(0.5)))
    assert net.first.weight.shape == (4, 6)


class Forces(nn.Module):
    """An energy and its gradient, as potentials of molecules have them."""

    def __init__(self, energy: nn.Module, way: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.energy, self.way = energy, way

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x)
            return energy, self.way(energy, x)


def went_back(energy: Tensor, x: Tensor) -> Tensor:
    energy.sum().backward()
    assert x.grad is not None
    return x.grad


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grad": lambda e, x: torch.autograd.grad(e.sum(), x, create_graph=True)[0],
    "along": lambda e, x: torch.autograd.grad(e, x, torch.ones_like(e))[0],
    "backward": went_back,
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_inside_of_forward(way: str) -> None:
    torch.manual_seed(0)
    energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))
    net, x = Forces(energy, WAYS[way]), torch.randn(4, 5, 6)
    graph = sec.trace(net, x)
    assert [axis.size for axis in graph.axes] == [8, 8]
    sec.apply(net, sec.plan(graph, sec.Ratio(0.5)))
    assert energy[0].weight.shape == (4, 6)
    assert net(x)[1].shape == x.shape


def test_a_way_back_without_a_record_is_named() -> None:
    net = Forces(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1)), WAYS["grad"])
    graph = sec.trace(net, torch.randn(4, 6))
    reasons = [blocked.reason for blocked in graph.blocked if blocked.tensor == "energy.0.weight" and blocked.dim == 0]
    assert reasons[0].startswith("native_layer_norm_backward: no rule for this op (test_trace_foreign.py:")


def test_mapped_derivatives_are_cut() -> None:
    class Jacobian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(torch.func.jacrev(self.net))(x)

    net, x = Jacobian(), torch.randn(4, 6)
    plan = sec.plan(sec.trace(net, x), sec.Ratio(0.5), exact=True)
    kept = plan.keep["net.0.weight"][0]
    with torch.no_grad():
        slope = 1 - torch.tanh(net.net[0](x)[:, kept]) ** 2
        want = torch.einsum("oh,bh,hi->boi", net.net[2].weight[:, kept], slope, net.net[0].weight[kept])
        torch.testing.assert_close(sec.apply(net, plan)(x), want)


def test_numbers_inside_of_a_mapped_function_name_where() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.func.vmap(lambda one: self.a(one).view(2, 4).sum(0))(x))

    graph = sec.trace(Mapped(), torch.randn(4, 6))
    reasons = [blocked.reason for blocked in graph.blocked if blocked.tensor == "a.weight" and blocked.dim == 0]
    assert "test_trace_foreign.py:" in reasons[0]
    assert "sizes cannot be seen" in reasons[0]
