"""Attributes that only say what weights are, read by somebody's code; and what a refusal says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import secateur as sec


class Between(nn.Module):
    """Two layers, and a function of the first's output between them."""

    def __init__(self, between: Callable[[Between, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(4, 8), nn.Linear(8, 2), between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self, torch.relu(self.a(x))))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def halved(net: nn.Module) -> tuple[sec.Plan, sec.Axis]:
    graph = sec.trace(net, X)
    plan = sec.plan(graph, sec.Ratio(0.5))
    sec.apply(net, plan)
    return plan, graph.axes[0]


NUMBERS = {
    "root": lambda n, h: h / n.b.in_features**0.5,
    "product": lambda n, h: h * (n.a.out_features * 2 + 1),
    "other layer": lambda n, h: h - torch.full_like(h, 1) * n.a.out_features,
    "quotient": lambda n, h: h * (n.b.in_features / 3),
}


@pytest.mark.parametrize("use", NUMBERS)
def test_used_as_a_number_it_is_inexact_and_verified(use: str) -> None:
    net = Between(NUMBERS[use])
    plan, axis = halved(net)
    assert "its size is used as a number" in axis.why
    assert (net.a.out_features, net.b.in_features) == (4, 4)
    assert "test_trace_readable.py" in axis.why
    assert {str(place): (was, now) for place, was, now in plan.attributes}.popitem()[1] == (8, 4)


def test_used_as_a_size_it_is_exact() -> None:
    for view in (
        lambda n, h: h.view(-1, n.b.in_features),
        lambda n, h: h.view(-1, n.b.in_features // 2, 2).flatten(1),
        lambda n, h: h + h.new_zeros(n.a.out_features),
    ):
        net = Between(view)
        _, axis = halved(net)
        assert axis.exact
        assert net.b.in_features == 4


def test_channels_of_a_convolution_in_groups() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.deep = nn.Conv1d(4, 8, 1), nn.Conv1d(8, 8, 3, groups=8)
            self.out = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.deep(self.up(x)).sum(2) / self.deep.in_channels)

    net, x = Net(), torch.randn(2, 4, 5)
    graph = sec.trace(net, x)
    assert not graph.axes[0].exact
    sec.apply(net, sec.plan(graph, sec.Ratio(0.5)))
    assert (net.deep.in_channels, net.deep.groups) == (4, 4)


def test_attributes_that_nobody_reads_are_not_in_the_plan() -> None:
    plan, axis = halved(Between(lambda n, h: h))
    assert plan.attributes == ()
    assert axis.exact


@pytest.mark.parametrize(
    "hidden",
    [lambda n, h: h - h.sum(1, keepdim=True) * (1.0 / h.shape[1]), lambda n, h: h / h.shape.numel()],
    ids=["a float on the left", "torch.Size.numel"],
)
def test_numbers_that_python_hides_are_found(hidden) -> None:
    """A float on the left and torch.Size.numel never ask a size for its value."""
    torch.manual_seed(0)
    _, axis = halved(Between(hidden))
    assert "its size is used as a number" in axis.why


def test_a_dimension_of_which_only_a_part_can_be_cut_says_so() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.cat([self.a(x), x], 1))

    graph = sec.trace(Joined(), X)
    reasons = {(blocked.tensor, blocked.dim): blocked.reason for blocked in graph.blocked}
    assert reasons["b.weight", 1] == "4 of its 12 positions: a dimension of the model's input"
    assert sec.Blocked("b.weight", 1, reasons["b.weight", 1]) in graph.blocked
    assert graph.axes[0].sites[-1] == sec.Site("b.weight", 1)


def test_a_flattened_map_is_not_partly_blocked() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))
    blocked = {(b.tensor, b.dim) for b in sec.trace(net, torch.zeros(1, 3, 8, 8)).blocked}
    assert ("2.weight", 1) not in blocked


def test_a_constraint_names_what_it_is_about() -> None:
    def same_size(n: Between, h: Tensor) -> Tensor:
        assert h.shape[1] == 2 * n.a.in_features
        return h

    graph = sec.trace(Between(same_size), X)
    reason = next(b.reason for b in graph.blocked if b.tensor == "a.weight" and b.dim == 0)
    assert "its size must satisfy the 8 of a.weight[0] == (" in reason
    assert "test_trace_readable.py" in reason


def test_axes_of_parameters_that_the_model_itself_holds_are_named_after_them() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.out = nn.Parameter(torch.randn(4, 8)), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.relu(x @ self.memory))

    assert [axis.name for axis in sec.trace(Net(), X).axes] == ["memory features"]
