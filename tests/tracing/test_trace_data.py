"""Bounds and positions that are tensors, and dimensions that nothing is in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import secateur as sec


class Net(nn.Module):
    """Something done to hidden positions and a table, between two layers."""

    def __init__(self, do: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.table = nn.Parameter(torch.randn(20, 8))
        self.do = do

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        x = self.first(x)
        return self.last(x), self.last(self.do(self, x, lengths))


def written(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    out = x.new_zeros(2, 7, x.shape[-1])
    out[:, : lengths.max()] = x + net.table.sum(0)
    return out


BOUNDS: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "up to": lambda net, x, n: x + net.table[: n.max()],
    "between": lambda net, x, n: x[:, n.min() : n.max()] + net.table[n.min() : n.max()],
    "one": lambda net, x, n: x + net.table[n.max()],
    "select": lambda net, x, n: x + torch.select(net.table, 0, n.max()),
    "narrow": lambda net, x, n: x + torch.narrow(net.table, 0, n.min() - 3, 5),
    "split": lambda _, x, n: torch.cat(torch.tensor_split(x, n.flip(0), dim=1), 1),
    "each": lambda _, x, n: torch.stack([row[:end].sum(0) for row, end in zip(x, n, strict=True)]),
    "written": written,
}


@pytest.mark.parametrize("bound", BOUNDS)
def test_bounds_that_are_tensors(bound: str) -> None:
    net, example = Net(BOUNDS[bound]), (torch.randn(2, 5, 6), torch.tensor([5, 3]))
    graph = sec.trace(net, example)
    assert 8 in [axis.size for axis in graph.axes]
    sec.apply(net, sec.plan(graph, sec.Ratio(0.5)))
    assert net.first.weight.shape == (4, 6)


@pytest.mark.parametrize(
    "do",
    [
        lambda _, x, n: x * x[..., n.max(), None],
        lambda _, x, n: x * x[..., : n.max()].sum(-1, keepdim=True),
        lambda _, x, n: x * torch.select(x, -1, n.max()).unsqueeze(-1),
    ],
)
def test_positions_that_data_chooses_stay(do: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
    graph = sec.trace(Net(do), (torch.randn(2, 5, 6), torch.tensor([5, 3])))
    assert graph.axes == ()
    reasons = {blocked.tensor: blocked.reason for blocked in graph.blocked if blocked.dim == 0}
    assert reasons["first.weight"].startswith("its positions are chosen by data (test_trace_data.py:")


def indices(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


NOTHING: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "indices": lambda _, x, n: x[indices(0)],
    "indices beside one": lambda _, x, n: x[indices(1, 0), indices(2, 1)],
    "indices before one": lambda _, x, n: x[indices(0), indices(1)],
    "a slice": lambda _, x, n: x[:, :0],
    "a slice plus a position": lambda _, x, n: x[:, :0] + x[:, :1],
    "merged": lambda _, x, n: x[:, :0].flatten(0, 1),
    "split": lambda _, x, n: x[:, :0].unflatten(-1, (2, -1)).flatten(-2),
    "a mask": lambda _, x, n: x[torch.zeros(2, 5, dtype=torch.bool)],
}


@pytest.mark.filterwarnings("ignore:on the example output 1 is empty")
@pytest.mark.parametrize("nothing", NOTHING)
def test_a_level_without_boxes(nothing: str) -> None:
    net, example = Net(NOTHING[nothing]), (torch.randn(2, 5, 6), torch.tensor([5, 3]))
    del net.table
    graph = sec.trace(net, example, variants=False)
    assert "first.weight" in {site.tensor for axis in graph.axes for site in axis.sites}
    sec.apply(net, sec.plan(graph, sec.Ratio(0.5)))
    assert net(*example)[1].numel() == 0


def test_only_what_is_alike_at_either_end_of_nothing_stays() -> None:
    from secateur.ops.view import _groups

    assert _groups([2, 0, 8], [0, 8]) == [([0], []), ([1], [0]), ([2], [8])]
    assert _groups([0, 12], [0, 3, 4]) == [([0], [0]), ([1], [3, 4])]
    assert _groups([4, 0, 6], [6, 0, 4]) == [([0, 1, 2], [6, 0, 4])]
    assert _groups([0, 8], [0, 8]) == [([0], [0]), ([1], [8])]
