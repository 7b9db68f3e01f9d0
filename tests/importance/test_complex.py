"""Parameters of complex numbers: scored by real and imaginary part, never refitted, never a crash."""

from __future__ import annotations

import warnings

import pytest
import torch
from test_contract import NAMES, every
from torch import Tensor, nn

import secateur as sec
from secateur.importance.weights import slice_sums


class Mixed(nn.Module):
    """Complex weights between real layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(7, 3)
        self.weight = nn.Parameter(torch.randn(8, 7, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x).tanh().to(torch.cfloat) @ self.weight).real)


class Spectral(nn.Module):
    """Weights of frequencies, as Fourier neural operators have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.randn(8, 8, 3, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.first(x).transpose(1, 2))[..., :3]
        waves = torch.einsum("bim,iom->bom", waves, self.weight)
        return self.last(torch.fft.irfft(waves, n=5).transpose(1, 2))


class Phases(nn.Module):
    """Nothing but complex layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8, dtype=torch.cfloat), nn.Linear(8, 3, dtype=torch.cfloat)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.to(torch.cfloat)).tanh()).abs()


MODELS = [Mixed, Spectral, Phases]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_every_criterion_scores_complex_parameters(name: str, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net, batches = kind(), [torch.randn(16, 5, 6) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sec.SecateurWarning)  # of scores by magnitude, where no product tells
        plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.4), importance=every(batches)[name])
    assert plan.axes
    sec.apply(net, plan)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", [sec.LeastSquares, sec.Constants, sec.Statistics])
def test_every_compensation_goes_past_complex_parameters(recipe: type, kind: type[nn.Module]) -> None:
    net, batches = kind(), [torch.randn(16, 5, 6) for _ in range(2)]
    sec.apply(net, sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.4)), compensate=recipe(batches))


@pytest.mark.parametrize("kind", MODELS)
def test_compress(kind: type[nn.Module]) -> None:
    net, batches = kind(), [torch.randn(16, 5, 6) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sec.SecateurWarning)
        sec.compress(net, batches[0], sec.Ratio(0.4), batches, timed=False)


def test_the_magnitude_of_complex_numbers() -> None:
    weight = torch.tensor([[3 + 4j, 0j], [1j, 2 + 0j]])
    assert slice_sums(weight, (0, 1), torch.square)[0].tolist() == [25.0, 5.0]
    assert slice_sums(weight.conj(), (1,), torch.square)[1].tolist() == [26.0, 4.0]


def test_the_gradient_of_complex_numbers() -> None:
    """A first-order Taylor term is what the loss changes by when a small weight goes."""
    net, x = Phases(), torch.randn(4, 5, 6)
    with torch.no_grad():
        net.first.weight[2] *= 1e-3
        net.first.bias[2] *= 1e-3
        net.last.weight[:, 2] *= 1e-3
    taylor = sec.Taylor([x], lambda model, batch: model(batch).square().sum())
    plan = sec.plan(sec.trace(net, x), sec.Ratio(1 / 8), importance=taylor)
    assert 2 not in plan.axes[0].keep
