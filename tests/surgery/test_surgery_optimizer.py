"""Training goes on after a cut as if the model had always been that small."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import secateur as sec

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD without momentum": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(X).square().mean().backward()
    optimizer.step()


def make(name: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = OPTIMIZERS[name]([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.05}])
    for _ in range(3):
        step(net, optimizer)
    return net, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_exactly_as_a_small_model_with_the_cut_state_would(name: str) -> None:
    net, optimizer = make(name)
    plan = sec.plan(sec.trace(net, X), sec.Ratio(0.5))
    keep = plan.axes[0].keep
    twin = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    twin_optimizer = OPTIMIZERS[name]([{"params": twin[0].parameters()}, {"params": twin[2].parameters(), "lr": 0.05}])
    slices = {0: lambda t: t[list(keep)], 1: lambda t: t[list(keep)], 2: lambda t: t[:, list(keep)], 3: lambda t: t}
    saved = copy.deepcopy(optimizer.state_dict())
    cut_state = {
        i: {k: slices[i](v) if isinstance(v, torch.Tensor) and v.dim() else v for k, v in entry.items()}
        for i, entry in saved["state"].items()
    }
    with torch.no_grad():
        for i, (small, big) in enumerate(zip(twin.parameters(), net.parameters(), strict=True)):
            small.copy_(slices[i](big))
    twin_optimizer.load_state_dict({"state": cut_state, "param_groups": saved["param_groups"]})

    sec.apply(net, plan, optimizer=optimizer)
    for _ in range(4):
        step(net, optimizer)
        step(twin, twin_optimizer)
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_groups_point_to_the_new_parameters_and_keep_their_settings() -> None:
    net, optimizer = make("Adam")
    sec.apply(net, sec.plan(sec.trace(net, X), sec.Ratio(0.5)), optimizer=optimizer)
    ours = [id(p) for p in net.parameters()]
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == ours
    assert {id(p) for p in optimizer.state} == set(ours)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.05]


def test_schedulers_and_state_dicts_keep_working() -> None:
    net, optimizer = make("Adam")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sec.apply(net, sec.plan(sec.trace(net, X), sec.Ratio(0.5)), optimizer=optimizer)
    step(net, optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.005
    optimizer.load_state_dict(optimizer.state_dict())
    step(net, optimizer)


def test_parameters_of_other_models_in_the_same_optimizer_are_left_alone() -> None:
    net, other = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), nn.Linear(4, 2)
    optimizer = torch.optim.Adam([*net.parameters(), *other.parameters()])
    (net(X) + other(X)).sum().backward()
    optimizer.step()
    state = optimizer.state[other.weight]["exp_avg"]
    sec.apply(net, sec.plan(sec.trace(net, X), sec.Ratio(0.5)), optimizer=optimizer)
    assert optimizer.param_groups[0]["params"][-2] is other.weight
    assert optimizer.state[other.weight]["exp_avg"] is state
