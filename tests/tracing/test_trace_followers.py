"""Weights that follow others, and code in forward that asks for gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import secateur as sec
from oracle import Net, zeroed

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mlp(d: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, d), nn.ReLU(), nn.Linear(d, 2)).double()


class Siblings(nn.Module):
    """Two modules of one form, of which one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = mlp(), mlp().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) - self.other(x)


@pytest.mark.parametrize(("like", "axes"), [(True, 1), (False, 2)])
def test_a_frozen_sibling_is_cut_alike_where_its_weights_are_like_the_others(like: bool, axes: int) -> None:
    model = Siblings()
    for slow, fast in [*zip(model.other.parameters(), model.one.parameters(), strict=True)] if like else ():
        slow.mul_(0.1).add_(fast.detach(), alpha=0.9)
    assert len(sec.trace(model, X).axes) == axes


def test_where_weights_have_no_values_siblings_are_cut_alike() -> None:
    assert len(sec.trace(Siblings().to("meta"), X).axes) == 1


class FastWeights(nn.Module):
    """MAML: steps on some examples, and then an answer; it does not say that it wants gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = mlp()

    def forward(self, support: Tensor, target: Tensor, query: Tensor) -> Tensor:
        fast = dict(self.net.named_parameters())
        for _ in range(2):
            loss = (functional_call(self.net, fast, (support,)) - target).square().mean()
            gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
        return functional_call(self.net, fast, (query,))


def test_gradients_that_forward_asks_for_are_there() -> None:
    model = FastWeights()
    full = copy.deepcopy(model)
    plan = sec.plan(sec.trace(model, (X, X[:, :2], X)), sec.Ratio(0.5), exact=True)
    sec.apply(model, plan)
    assert model.net[0].out_features == 6
    others = X[:2] + 1, X[:2, 1:3], X + 2
    assert torch.allclose(model(*others), zeroed(full, plan.kept)(*others), rtol=0, atol=1e-12)


def test_a_function_that_forward_calls_may_ask_for_them() -> None:
    net = Net(lambda n, x: n.b(torch.relu(n.a(x))) + slope(n, x), a=nn.Linear(4, 8), b=nn.Linear(8, 1)).double()
    assert [axis.size for axis in sec.trace(net, X).axes] == [8]


def slope(n: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(n.b(torch.tanh(n.a(x))).sum(), x)[0].sum()
