"""Zeros spread over layers: the mean is what was asked for, and they go where they cost least."""

import pytest
import torch
from torch import nn

import secateur as sec
from secateur.calibrate import calibrating
from secateur.errors import PlanError
from secateur.sparse.spread import Spread, cut_off, prices


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)).eval()


def _batches() -> list[torch.Tensor]:
    return [torch.randn(8, 3, 10, 10, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


@pytest.mark.parametrize("spread", [sec.ERK(), sec.Prices()], ids=str)
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_the_whole_has_the_sparsity_that_was_asked_for(spread: Spread, sparsity: float) -> None:
    net = _net()
    report = sec.sparsify(net, _batches(), sec.Unstructured(sparsity), spread=spread)
    assert report.sparsity == pytest.approx(sparsity, abs=2e-3)
    assert len({round(layer.sparsity, 3) for layer in report.layers}) == 3
    assert all(layer.sparsity < 1 for layer in report.layers)


def test_one_distribution_serves_one_shot_and_training() -> None:
    net = nn.Sequential(nn.Linear(10, 10), nn.Linear(100, 100))
    found = sec.ERK().sparsities(net, ["0.weight", "1.weight"], 0.9, [])
    assert found == pytest.approx({"0.weight": 1 - 0.918, "1.weight": 0.908}, abs=1e-3)
    assert sec.ERK is sec.training.ERK
    uniform = sec.training.Uniform().sparsities(net, ["0.weight", "1.weight"], 0.9, [])
    assert uniform == pytest.approx({"0.weight": 0.9, "1.weight": 0.9})


def test_a_price_is_what_the_output_loses() -> None:
    """For one linear layer behind another, the Fisher information by automatic differentiation, weight by weight."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1), nn.Flatten())
    x = torch.randn(4000, 3, 1, 1)
    with calibrating(net):
        found = prices(net, ["0.weight"], [x])["0.weight"].view(4, 3)
        logits = net(x)
        chances = logits.softmax(-1)
        second = net[1].weight.detach().flatten(1)
        inner = torch.diag_embed(chances) - chances.unsqueeze(2) * chances.unsqueeze(1)
        matters = torch.einsum("noh,oi,hi->ni", inner, second, second).mean(0)
    exact = net[0].weight.detach().flatten(1).square() * x.flatten(1).square().mean(0) * matters.unsqueeze(1)
    assert torch.allclose(found / found.sum(), exact / exact.sum(), atol=0.02)


def test_the_lowest_go_but_not_nearly_all_of_any() -> None:
    scores = {"low": torch.arange(100.0), "high": torch.arange(100.0) + 1000}
    found = cut_off(scores, 0.5)
    assert found["low"] == pytest.approx(0.9)
    assert found["high"] == pytest.approx(0.1)


def test_erk_keeps_small_layers_whole() -> None:
    found = sec.ERK().sparsities(nn.Sequential(nn.Linear(2, 2), nn.Linear(200, 200)), ["0.weight", "1.weight"], 0.5, [])
    assert found["0.weight"] == 0
    assert (4 * found["0.weight"] + 40_000 * found["1.weight"]) / 40_004 == pytest.approx(0.5)


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(PlanError, match="nothing to spread"):
        sec.sparsify(_net(), _batches(), sec.NM(2, 4), spread=sec.ERK(), protect="0.weight")
    with pytest.raises(PlanError, match="spread is Prices"):
        sec.sparsify(_net(), _batches(), sec.Unstructured(0.5), spread="erk")  # type: ignore[arg-type]
