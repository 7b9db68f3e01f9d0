"""A weight that data are multiplied with as it is, and transposed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from secateur.calibrate.fisher import fisher_weights
from secateur.importance.reconstruction import MomentStore


class Autoencoder(nn.Module):
    """Reads with a weight and writes with its transpose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.randn(8, width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) @ self.weight).relu() @ self.weight.T)


@pytest.mark.parametrize("width", [10, 8])
def test_it_is_compressed(width: int) -> None:
    net, batches = Autoencoder(width), [torch.randn(64, 6) for _ in range(4)]
    report = sec.compress(net, batches[0], sec.Ratio(0.4), batches, timed=False)
    assert report.compensation is not None
    assert report.compensation.after < report.compensation.before
    assert any(
        "weight was not refitted: it is used in more than one place" in note for note in report.compensation.notes
    )
    assert "weight" not in [layer.name for layer in report.compensation.layers]


@pytest.mark.parametrize("width", [10, 8])
def test_what_goes_in_is_told_apart(width: int) -> None:
    net, batches = Autoencoder(width), [torch.randn(64, 6) for _ in range(2)]
    moments = MomentStore(net, batches).of({"weight"})["weight"]
    assert sorted(m.weight.shape[1:] for m in moments) == sorted([(8, width), (width, 8)])
    assert all(bool((m.fisher > 0).all()) and m.fisher.shape == m.weight.shape[:2] for m in moments)
    with torch.no_grad():
        assert len([part for part in fisher_weights(net, batches) if part[0] == "weight"]) == 2


def test_every_recipe_goes_past_it() -> None:
    for recipe in (sec.LeastSquares, sec.Constants, sec.Statistics):
        net, batches = Autoencoder(10), [torch.randn(64, 6) for _ in range(2)]
        sec.apply(net, sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.4)), compensate=recipe(batches))
