"""Parameters and buffers stay the objects that they are; whoever remembers them as they were says so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import secateur as sec
from secateur.pipeline import apply as apply_module

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def loss(net: nn.Module) -> Tensor:
    return (net(X) - 1).square().mean()


def cut(net: nn.Module, ratio: float = 0.5, **options: Any) -> nn.Module:
    return sec.apply(net, sec.plan(sec.trace(net, X), sec.Ratio(ratio)), **options)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    found = loss(net)
    found.backward()
    optimizer.step()
    return float(found)


def test_every_tensor_is_the_object_it_was() -> None:
    net = made()
    weight, mean = net[0].weight, net[1].running_mean
    before = {name: id(tensor) for name, tensor in net.state_dict(keep_vars=True).items()}
    cut(net)
    assert {name: id(tensor) for name, tensor in net.state_dict(keep_vars=True).items()} == before
    assert net[0].weight is weight
    assert weight.shape == (4, 4)
    assert mean.shape == (4,)


def test_a_recurrent_layer_s_own_list_of_weights() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 6, batch_first=True))
    cut(net)
    assert all(a is b for a, b in zip(net[1]._flat_weights, net[1].parameters(), strict=True))


def test_an_optimizer_that_was_not_passed_trains_on() -> None:
    net = made()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer)
    cut(net)
    losses = [step(net, optimizer) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


STATEFUL: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "fused Adam": lambda p: torch.optim.Adam(p, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, fused=True),
    "ASGD": torch.optim.ASGD,
    "RMSprop": torch.optim.RMSprop,
}


def begins_anew(make: Callable[[Any], torch.optim.Optimizer]) -> bool:
    """Whether an optimizer goes on without its state: Adagrad's is there from the start, torch 2.8 makes no other."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = make([parameter])
    optimizer.state.clear()
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("ratio", [0.5, 0.99], ids=["half", "to one position, which broadcasts"])
@pytest.mark.parametrize("name", STATEFUL)
def test_state_of_the_old_shape_is_refused_until_it_is_gone(name: str, ratio: float) -> None:
    net = made()
    optimizer = STATEFUL[name](net.parameters())
    step(net, optimizer)
    cut(net, ratio)
    before = copy.deepcopy(net.state_dict())
    for _ in range(2):
        with pytest.raises(sec.ApplyError, match=r"parameter 0 of this \w+ was cut to .*pass the optimizer to the cut"):
            step(net.eval(), optimizer)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    optimizer.state.clear()
    if begins_anew(STATEFUL[name]):
        step(net.train(), optimizer)


def test_an_optimizer_that_was_passed_goes_on() -> None:
    net = made()
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    step(net, optimizer)
    cut(net, optimizer=optimizer)
    step(net, optimizer)


def test_the_last_loss_may_still_be_there() -> None:
    """Its graph keeps autograd's nodes, which have the old shapes."""
    net = made()
    last = loss(net)
    last.backward()
    cut(net)
    loss(net).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in net.parameters())
    assert last.grad_fn is not None


def test_a_graph_from_before_is_not_run_through_what_is_left() -> None:
    net = made()
    x = X.clone().requires_grad_()
    pending = net(x).sum()
    cut(net, 0.99)
    with pytest.raises(RuntimeError):
        pending.backward()


def test_a_graph_from_before_runs_after_a_cut_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = made()
    last = loss(net)
    pointers = {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}
    plan = sec.plan(sec.trace(net, X), sec.Ratio(0.5))

    def refuse(*_: Any) -> None:
        raise sec.VerifyError("planted")

    monkeypatch.setattr(apply_module, "check", refuse)
    with pytest.raises(sec.VerifyError, match="planted"):
        sec.apply(net, plan)
    assert {name: tensor.data_ptr() for name, tensor in net.state_dict().items()} == pointers
    last.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in net.parameters())


def test_tensors_of_every_kind() -> None:
    class Named(nn.Parameter):
        pass

    class Strange(Tensor):
        pass

    with torch.inference_mode():
        frozen = nn.Linear(8, 8)
    net = nn.Sequential(nn.Linear(4, 8), frozen, nn.Linear(8, 8, dtype=torch.float32), nn.Linear(8, 2))
    net[0].weight = Named(net[0].weight.detach().clone())
    net[2].weight = nn.Parameter(net[2].weight.detach().clone().as_subclass(Strange))
    held = list(net.parameters())
    kinds = [type(p) for p in held]
    cut(net)
    assert [type(p) for p in net.parameters()] == kinds
    assert all(a is b for a, b in zip(held, net.parameters(), strict=True))
    assert frozen.weight.is_inference()
    with torch.inference_mode():
        assert net(X).shape == (6, 2)


def test_a_weight_that_another_model_holds_is_not_cut() -> None:
    net, teacher = made(), made()
    teacher[0].weight = net[0].weight
    plan = sec.plan(sec.trace(net, X), sec.Ratio(0.5))
    before = teacher(X)
    with pytest.raises(sec.ApplyError, match=r"0\.weight is held by a Linear outside of Sequential too"):
        sec.apply(net, plan)
    assert torch.equal(teacher.eval()(X), net.eval()(X)) or torch.equal(teacher.train()(X), before)
    del teacher
    sec.apply(net, plan)
    assert net[0].weight.shape == (4, 4)


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("inside", [False, True], ids=["the wrapper", "the model inside"])
def test_a_distributed_wrapper_from_before_goes_on(inside: bool) -> None:
    net = made()
    wrapped = DistributedDataParallel(net)
    loss(wrapped).backward()
    cut(net if inside else wrapped)
    with torch.no_grad():
        assert wrapped(X).shape == (6, 2)
    for model in (wrapped, DistributedDataParallel(net)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = [step(model, optimizer) for _ in range(10)]
        assert losses[-1] < losses[0]


@pytest.mark.usefixtures("process_group")
def test_a_distributed_wrapper_around_a_model_that_was_loaded_refuses_to_train(tmp_path: Path) -> None:
    """Whether other ranks loaded it, too, is not known."""
    net = made()
    cut(net)
    sec.save(net, tmp_path / "cut")
    wrapped = DistributedDataParallel(made())
    loss(wrapped).backward()
    sec.load(tmp_path / "cut", wrapped)
    with pytest.raises(sec.ApplyError, match="wrap the model anew"):
        wrapped(X)
    with torch.no_grad():
        assert wrapped(X).shape == (6, 2)


def test_a_weight_that_a_function_holds_is_the_model_s() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
            weight = self.a.weight
            self.again = lambda x: nn.functional.linear(x, weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.b((self.a(x) + self.again(x)).relu())

    net = Held()
    cut(net)
    assert net.a.weight.shape == (4, 4)
    assert net(X).shape == (6, 2)
