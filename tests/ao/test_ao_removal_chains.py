"""The layer chains that `torch.ao.pruning` knows: for the same masks, the same result as the installed one gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.pruning._experimental.pruner as theirs
import torch.nn.functional as F
from removal_models import Off, masked, rows_pruner, shapes
from torch import Tensor, nn

FUNCTIONS = [
    F.relu, F.rrelu, F.hardtanh, F.relu6, F.hardsigmoid, F.silu, F.mish, F.hardswish, F.elu, F.celu, F.selu,
    F.hardshrink, F.leaky_relu, F.logsigmoid, F.softplus, F.softsign, F.tanhshrink, F.gelu,
]  # fmt: skip
MODULES = [
    nn.ReLU, nn.RReLU, nn.Hardtanh, nn.ReLU6, nn.Sigmoid, nn.Hardsigmoid, nn.Tanh, nn.SiLU, nn.Mish, nn.Hardswish,
    nn.ELU, nn.CELU, nn.SELU, nn.Hardshrink, nn.LeakyReLU, nn.LogSigmoid, nn.Softplus, nn.PReLU, nn.Softsign,
    nn.Tanhshrink, nn.GELU,
]  # fmt: skip
IMAGE = (2, 3, 10, 10)


class Between(nn.Module):
    """Two layers and a function between them."""

    def __init__(self, first: nn.Module, function: Callable[[Tensor], Tensor], second: nn.Module) -> None:
        super().__init__()
        self.first, self.function, self.second = first, function, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


def check_against_torch(model: nn.Module, x: Tensor, off: Off, prune_bias: bool) -> Any:
    """Prune copies of a model with ours and with torch's; the outputs must agree. Returns ours and both models."""
    mine, other = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    pruner = masked(mine, off, prune_bias=prune_bias)
    reference = rows_pruner(theirs.BaseStructuredSparsifier, other, off, prune_bias=prune_bias)
    with torch.no_grad():
        other(x)  # torch's bias hook prunes the bias only now
        other = reference.prune()
        torch.testing.assert_close(pruner.prune()(x), other(x), rtol=1e-4, atol=1e-5)
    return pruner, mine, other


@pytest.mark.parametrize("prune_bias", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_linear_function_linear(function: Callable[[Tensor], Tensor], prune_bias: bool) -> None:
    model = Between(nn.Linear(4, 6), function, nn.Linear(6, 3))
    _, mine, other = check_against_torch(model, torch.randn(5, 4), {"first.weight": [1, 4]}, prune_bias)
    assert shapes(mine) == shapes(other)


@pytest.mark.parametrize("prune_bias", [True, False])
@pytest.mark.parametrize("activation", MODULES, ids=lambda m: m.__name__)
def test_conv_activation_conv(activation: type[nn.Module], prune_bias: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), activation(), nn.Conv2d(5, 4, 3))
    _, mine, other = check_against_torch(model, torch.randn(IMAGE), {"0.weight": [0, 3]}, prune_bias)
    assert shapes(mine) == shapes(other)


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, F.sigmoid, F.tanh], ids=lambda f: f.__name__)
def test_functions_that_torch_lists_but_does_not_find(function: Callable[[Tensor], Tensor]) -> None:
    """Compared with the same activation as a module, which torch does find."""
    module = nn.Sigmoid() if "sigmoid" in function.__name__ else nn.Tanh()
    first, second, x = nn.Linear(4, 6), nn.Linear(6, 3), torch.randn(5, 4)
    mine = Between(copy.deepcopy(first), function, copy.deepcopy(second))
    masked(mine, {"first.weight": [1]}, prune_bias=False).prune()
    other = nn.Sequential(first, module, second)
    other = rows_pruner(theirs.BaseStructuredSparsifier, other, {"0.weight": [1]}, prune_bias=False).prune()
    torch.testing.assert_close(mine(x), other(x))


POOLS = {
    "none": [],
    "activation, average": [nn.ReLU(), nn.AvgPool2d(2)],
    "activation, max": [nn.Tanh(), nn.MaxPool2d(2)],
    "average, activation": [nn.AvgPool2d(2), nn.GELU()],
    "max, activation": [nn.MaxPool2d(2), nn.LeakyReLU()],
    "activation": [nn.Sigmoid()],
}


@pytest.mark.parametrize("prune_bias", [True, False])
@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("pool", POOLS)
def test_conv_pool_conv(pool: str, biases: tuple[bool, bool], prune_bias: bool) -> None:
    first, second = nn.Conv2d(3, 5, 3, bias=biases[0]), nn.Conv2d(5, 4, 3, bias=biases[1])
    check_against_torch(
        nn.Sequential(first, *POOLS[pool], second), torch.randn(IMAGE), {"0.weight": [0, 3]}, prune_bias
    )


@pytest.mark.parametrize("prune_bias", [True, False])
@pytest.mark.parametrize("pool", [F.avg_pool2d, F.max_pool2d], ids=lambda f: f.__name__)
@pytest.mark.parametrize("first", ["pool", "activation"])
def test_conv_functional_pool_conv(pool: Callable[..., Tensor], first: str, prune_bias: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            x = F.relu(pool(x, 2)) if first == "pool" else pool(F.relu(x), 2)
            return self.b(x)

    check_against_torch(Net(), torch.randn(IMAGE), {"a.weight": [0, 3]}, prune_bias)


@pytest.mark.parametrize("prune_bias", [True, False])
@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])
@pytest.mark.parametrize("functional", [True, False])
def test_conv_adaptive_pool_flatten_linear(pool: type[nn.Module], functional: bool, prune_bias: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool, self.flatten, self.fc = nn.Conv2d(3, 5, 3), pool(2), nn.Flatten(), nn.Linear(20, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(self.conv(x))
            return self.fc(torch.flatten(x, 1) if functional else self.flatten(x))

    _, mine, other = check_against_torch(Net(), torch.randn(IMAGE), {"conv.weight": [1, 4]}, prune_bias)
    assert shapes(mine) == shapes(other)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prune_bias", [True, False])
def test_linear_linear_and_conv_conv(bias: bool, prune_bias: bool) -> None:
    linear = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Linear(6, 5, bias=bias), nn.Linear(5, 3, bias=bias))
    _, mine, other = check_against_torch(
        linear, torch.randn(5, 4), {"0.weight": [1, 4], "1.weight": [0]}, prune_bias=prune_bias
    )
    assert shapes(mine) == shapes(other)
    conv = nn.Sequential(nn.Conv2d(3, 6, 3, bias=bias), nn.Conv2d(6, 5, 1, bias=bias), nn.Conv2d(5, 3, 1, bias=bias))
    check_against_torch(conv, torch.randn(IMAGE), {"0.weight": [1, 4], "1.weight": [0]}, prune_bias)


@pytest.mark.parametrize(("bias", "prune_bias"), [(True, True), (False, True), (False, False)])
def test_output_rows(bias: bool, prune_bias: bool) -> None:
    linear = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.ReLU(), nn.Linear(6, 3, bias=bias))
    off = {"0.weight": [0], "2.weight": [1]}
    _, mine, other = check_against_torch(linear, torch.randn(5, 4), off, prune_bias)
    assert shapes(mine) == shapes(other)
    conv = nn.Sequential(nn.Conv2d(3, 6, 3, bias=bias))
    _, mine, other = check_against_torch(conv, torch.randn(IMAGE), {"0.weight": [2]}, prune_bias)
    assert shapes(mine) == shapes(other)


def test_an_output_row_goes_but_the_biases_of_the_others_stay() -> None:
    """Torch's model does not run any more after this: it leaves the bias behind at full size."""
    model, x = nn.Sequential(nn.Linear(4, 3)).eval(), torch.randn(5, 4)
    want = model(x)
    assert masked(model, {"0.weight": [1]}, prune_bias=False).prune()[0].bias.shape == (2,)
    torch.testing.assert_close(model(x), want[:, [0, 2]])


@pytest.mark.parametrize("prune_bias", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("between", [[], [nn.ReLU()], [nn.Sigmoid()], [nn.MaxPool2d(2), nn.Tanh()]], ids=str)
def test_padded_conv(between: list[nn.Module], bias: bool, prune_bias: bool) -> None:
    """A constant next to padding is no constant for a convolution, so such channels stay, as torch lets them."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3, bias=bias), *between, nn.Conv2d(5, 4, 3, padding=1))
    pruner, mine, other = check_against_torch(model, torch.randn(IMAGE), {"0.weight": [0, 3]}, prune_bias)
    if bias and not prune_bias and not between:
        assert pruner.kept_masked[0][0] == "0.weight"
        assert "zeros beyond their border" in pruner.kept_masked[0][1]
        assert shapes(mine) == shapes(other) == shapes(model)
    size = sum(tensor.numel() for tensor in mine.parameters())
    assert size <= sum(tensor.numel() for tensor in other.parameters())


def test_a_constant_of_padding_that_repeats_is_folded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3, padding=1, padding_mode="circular")).eval()
    x = torch.randn(IMAGE)
    pruner = masked(model, {"0.weight": [0, 3]}, prune_bias=False)
    want = model(x)
    torch.testing.assert_close(pruner.prune()(x), want, rtol=1e-4, atol=1e-5)
    assert pruner.kept_masked == ()
    assert model[0].weight.shape[0] == 3


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Hardsigmoid, nn.Softplus, nn.LogSigmoid])
def test_the_activation_of_zero_is_not_carried_on_and_that_is_said(activation: type[nn.Module]) -> None:
    """As torch does it: a row that is off with its bias is gone, although the masked model still has f(0) there."""
    model = nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 3))
    pruner, mine, _ = check_against_torch(model, torch.randn(5, 4), {"0.weight": [1]}, prune_bias=True)
    assert [name for name, _ in pruner.removal.inexact] == ["0.weight"]
    assert torch.equal(mine[2].bias, model[2].bias)
