"""Models that draw numbers, or compute in a precision of their own, are checked like any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sec
from secateur.verify.run import outputs


class Net(nn.Module):
    """Something done to hidden positions, between two layers."""

    def __init__(self, do: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.do = do

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.do(self.second(self.do(self.first(x).relu())).tanh()))


CHANCES: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout that is always on": lambda x: F.dropout(x, 0.5, training=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "channels": lambda x: F.dropout1d(x, 0.5, training=True),
    "noise": lambda x: x + torch.randn_like(x) * torch.rand(x.shape),
    "its own generator": lambda x: x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1)),
    "a mask": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "in place": lambda x: x + torch.empty_like(x).uniform_(-1, 1).exponential_().normal_(),
    "around": lambda x: torch.normal(x, 0.1) + torch.normal(x, x.abs()),
    "a single number": lambda x: x * torch.rand([]),
    "a choice": lambda x: F.gumbel_softmax(x, dim=-1),
    "slopes": lambda x: F.rrelu(x, training=True),
    "an order of rows": lambda x: x[torch.randperm(x.shape[0])] + F.dropout(x, training=True),
    "a sample": lambda x: x * torch.multinomial(torch.ones(4), 1),
}


@pytest.mark.parametrize("chance", CHANCES)
def test_models_that_draw_are_checked(chance: str) -> None:
    net, x = Net(CHANCES[chance]), torch.randn(2, 5, 6)
    plan = sec.plan(sec.trace(net, x), sec.Ratio(0.5))
    assert len(plan.axes) == 2
    sec.apply(net, plan)


def test_a_wrong_cut_of_a_model_that_draws_is_noticed() -> None:
    net, x = Net(CHANCES["dropout that is always on"]), torch.randn(2, 5, 6)
    wrong = Net(CHANCES["dropout that is always on"])
    with torch.no_grad():
        wrong.second.weight[3] += 0.1
    right = outputs(net, x, torch.float64)[0]
    assert torch.equal(right, outputs(net, x, torch.float64)[0])
    assert float((right - outputs(wrong, x, torch.float64)[0]).abs().max()) > 1e-3


TABLE = torch.randn(5, 5)


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a product with what was made": lambda x: torch.eye(5, dtype=torch.float32) @ x.float(),
    "a product with a constant": lambda x: TABLE @ x,
    "half precision": lambda x: (x.half() * 2).float(),
    "numbers from ints": lambda x: torch.sqrt(torch.arange(1, 6)).diag() @ x,
    "written by index": lambda x: x.index_put((torch.tensor([0]),), torch.ones(1)),
    "complex": lambda x: torch.complex(x.float(), torch.zeros_like(x)).abs(),
    "sums of a kind": lambda x: x * x.sum(1, keepdim=True, dtype=torch.float32),
}


@pytest.mark.parametrize("cast", CASTS)
def test_models_that_cast_are_checked_in_double_precision(cast: str) -> None:
    net, x = Net(CASTS[cast]), torch.randn(2, 5, 6)
    out = outputs(net, x, torch.float64)[0]
    assert out.dtype == torch.float64
    assert not torch.equal(out, out.float().double())
    plan = sec.plan(sec.trace(net, x), sec.Ratio(0.5))
    assert len(plan.axes) == 2
    sec.apply(net, plan)


def test_coordinates_in_single_precision() -> None:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
            at = torch.stack([columns, rows], -1).float()[None].repeat(x.shape[0], 1, 1, 1)
            return self.last(F.grid_sample(self.first(x), at / 4, align_corners=True))

    net, x = Flow(), torch.randn(2, 3, 4, 4)
    assert outputs(net, x, torch.float64)[0].dtype == torch.float64
    sec.apply(net, sec.plan(sec.trace(net, x), sec.Ratio(0.5)))


WHOLES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean by count": lambda x: x / x.numel(),
    "mean by torch.numel": lambda x: x.sum() / torch.numel(input=x) * x,
    "mse": lambda x: x * F.mse_loss(x, x * 2),
    "smooth l1": lambda x: x * F.smooth_l1_loss(x, x * 2, reduction="sum"),
    "distance": lambda x: x * F.pairwise_distance(x, x + 1, keepdim=True),
    "dist": lambda x: x * torch.dist(x, x * 2),
    "extremes": lambda x: x * torch.aminmax(x).max,
    "median": lambda x: x * x.median(),
    "maximum": lambda x: x * x.max(),
    "product": lambda x: x * (x.cos() + 1).prod(),
    "nuclear": lambda x: x * x.std(),
    "similar": lambda x: x * F.cosine_similarity(x, x + 1, dim=-1)[..., None],
}


@pytest.mark.parametrize("whole", WHOLES)
def test_numbers_made_of_everything_are_checked(whole: str) -> None:
    net, x = Net(WHOLES[whole]), torch.randn(2, 5, 6)
    plan = sec.plan(sec.trace(net, x), sec.Ratio(0.5))
    assert len(plan.axes) == 2
    sec.apply(net, plan)
