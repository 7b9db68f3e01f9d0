"""A cut model is a model like any other: it trains, copies, pickles, compiles, exports, and can be cut again."""

from __future__ import annotations

import copy
import pickle
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import secateur as sec
from oracle import difference, each_axis, outputs, randomised, zeroed


class Small(nn.Module):
    """A residual convolution, torch's attention, and a gated head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.gate = nn.Linear(8, 16)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = (x + self.block(x)).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        a, b = self.gate(x).chunk(2, -1)
        return self.fc((a * b.sigmoid()).mean(1))


X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def made() -> Small:
    torch.manual_seed(0)
    return Small()


def cut(net: nn.Module, **keywords: Any) -> sec.Plan:
    graph = sec.trace(net, X)
    plan = sec.plan(graph, each_axis(graph, 0.5), **keywords)
    assert sec.apply(net, plan) is net
    return plan


@pytest.fixture(scope="module")
def small() -> Small:
    net = made()
    cut(net)
    assert type(net.attention) is not nn.MultiheadAttention
    return net.eval()


def test_it_trains() -> None:
    net = made().train()
    cut(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (net(X) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


def test_it_deep_copies(small: Small) -> None:
    other = copy.deepcopy(small)
    assert torch.equal(other(X), small(X))
    with torch.no_grad():
        other.fc.weight.zero_()
    assert not torch.equal(other(X), small(X))


def test_it_pickles(small: Small) -> None:
    assert torch.equal(pickle.loads(pickle.dumps(small))(X), small(X))


def test_its_state_dict_loads_into_a_cut_twin(small: Small) -> None:
    twin = made()
    cut(twin)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(small.state_dict())
    assert torch.equal(twin.eval()(X), small(X))


def test_it_compiles(small: Small) -> None:
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(small, backend="aot_eager", fullgraph=True)(X), small(X), atol=1e-6)


def test_it_exports(small: Small) -> None:
    exported = torch.export.export(small, (X,))
    assert torch.allclose(exported.module()(X), small(X), atol=1e-6)
    shapes = {name: tuple(tensor.shape) for name, tensor in small.state_dict().items()}
    assert {name: tuple(tensor.shape) for name, tensor in exported.state_dict.items()} == shapes


def test_it_scripts_no_worse_than_before() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()
    cut(net)
    assert torch.equal(torch.jit.trace(net, X)(X), net(X))


def test_through_a_compiled_wrapper() -> None:
    torch._dynamo.reset()
    net = made().eval()
    wrapped = torch.compile(net, backend="eager")
    wrapped(X)
    plan = sec.plan(sec.trace(wrapped, X), sec.Ratio(0.5))
    assert sec.apply(wrapped, plan) is wrapped
    assert net.stem.out_channels == 4
    assert torch.allclose(wrapped(X), net(X), atol=1e-6)


@pytest.fixture
def process_group() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_through_a_distributed_wrapper() -> None:
    net = made()
    wrapped = DistributedDataParallel(net)
    wrapped(X).sum().backward()
    plan = sec.plan(sec.trace(wrapped, X), sec.Ratio(0.5))
    assert sec.apply(wrapped, plan) is wrapped
    assert wrapped.module.stem.out_channels == 4
    with torch.no_grad():
        assert wrapped(X).shape == (2, 3)
    again = DistributedDataParallel(net)  # its buckets know the new parameters
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    again(X).sum().backward()
    optimizer.step()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in net.parameters())


def test_a_cut_model_can_be_cut_again_and_the_plans_compose() -> None:
    net = randomised(made())
    x = X.double()
    fresh, at_once = copy.deepcopy(net), copy.deepcopy(net)
    first = sec.plan(sec.trace(net, x), sec.Ratio(0.25), exact=True)
    sec.apply(net, first)
    second = sec.plan(sec.trace(net, x), sec.Ratio(0.5), importance=sec.Random(3), exact=True)
    assert second.axes
    sec.apply(net, second)
    both = first.then(second)
    sec.apply(at_once, both)
    assert {k: tuple(v.shape) for k, v in net.state_dict().items()} == {
        k: tuple(v.shape) for k, v in at_once.state_dict().items()
    }
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, at_once.state_dict()[name]), name
    assert torch.equal(net(x), at_once(x))
    assert difference(outputs(net, x), outputs(zeroed(fresh, both.kept), x)) < 1e-9


def test_three_cuts_one_after_the_other() -> None:
    net = made()
    sizes = []
    for seed in range(3):
        sec.apply(net, sec.plan(sec.trace(net, X), sec.Ratio(0.3), importance=sec.Random(seed)))
        sizes.append(sum(p.numel() for p in net.parameters()))
    assert sizes[0] > sizes[1] > sizes[2]
    assert net(X).shape == (2, 3)
