"""Layers that take over the constant of removed channels: convolutions in groups, transposed ones, added biases."""

from __future__ import annotations

import copy

import pytest
import torch
from removal_models import masked, prune_like_masked, random_norms
from torch import nn

from secateur.surgery.bias import added_biases


def through_norm(*reader: nn.Module) -> nn.Module:
    return random_norms(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Sigmoid(), *reader))


X = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [2, 4])
def test_a_convolution_in_groups(groups: int, bias: bool) -> None:
    """Each group reads its own channels: a column goes where the channel of every group is off."""
    model = through_norm(nn.Conv2d(8, 12, 3, groups=groups, bias=bias), nn.ReLU(), nn.Conv2d(12, 2, 1))
    each = 8 // groups
    off = [each * group + 1 for group in range(groups)]
    pruner = prune_like_masked(model, {"0.weight": off}, X, prune_bias=False)
    assert pruner.removal.removed == {"0.weight": groups}
    assert (pruner.kept_masked, pruner.removal.inexact) == ((), ())
    assert model[3].weight.shape[1] == each - 1
    assert added_biases(model) == (() if bias else ("3",))


def test_a_convolution_in_groups_that_is_cut_itself() -> None:
    model = through_norm(nn.Conv2d(8, 12, 3, groups=2, bias=False), nn.ReLU(), nn.Conv2d(12, 2, 1))
    pruner = prune_like_masked(model, {"0.weight": [0, 4], "3.weight": [2, 8]}, X, prune_bias=False)
    assert pruner.removal.removed == {"0.weight": 2, "3.weight": 2}
    assert model[3].weight.shape == (10, 3, 3, 3)
    assert model[3].bias.shape == (10,)


def test_channels_of_one_group_only_stay() -> None:
    model = through_norm(nn.Conv2d(8, 12, 3, groups=2), nn.Conv2d(12, 2, 1))
    pruner = prune_like_masked(model, {"0.weight": [0, 1]}, X, prune_bias=False)
    assert pruner.removal.removed == {}
    assert pruner.kept_masked[0][0] == "0.weight"


@pytest.mark.parametrize("bias", [True, False])
def test_a_transposed_convolution_of_one_tap(bias: bool) -> None:
    model = through_norm(nn.ConvTranspose2d(8, 6, 1, bias=bias), nn.ReLU(), nn.Conv2d(6, 2, 1))
    pruner = prune_like_masked(model, {"0.weight": [2, 5]}, X, prune_bias=False)
    assert pruner.removal.removed == {"0.weight": 2}
    assert model[3].weight.shape == (6, 6, 1, 1)
    assert model[3].bias.shape == (6,)


@pytest.mark.parametrize("options", [{"kernel_size": 3}, {"kernel_size": 1, "stride": 2}], ids=["taps", "stride"])
def test_other_transposed_convolutions_see_the_border(options: dict[str, int]) -> None:
    model = through_norm(nn.ConvTranspose2d(8, 6, **options), nn.Conv2d(6, 2, 1))
    pruner = prune_like_masked(model, {"0.weight": [2, 5]}, X, prune_bias=False)
    assert pruner.removal.removed == {}
    assert "3.weight cannot take a constant into a bias" in pruner.kept_masked[0][1]


def test_a_padded_convolution_in_groups_says_why_channels_stay() -> None:
    model = through_norm(nn.Conv2d(8, 12, 3, groups=2, padding=1), nn.Conv2d(12, 2, 1))
    model.insert(0, nn.Conv2d(3, 3, 1))
    pruner = prune_like_masked(model, {"1.weight": [0, 4]}, X, prune_bias=False)
    assert pruner.removal.removed == {}
    assert "4.weight reads zeros beyond their border" in pruner.kept_masked[0][1]


@pytest.mark.parametrize("saved", [True, False])
def test_a_saved_state_says_whether_biases_are_pruned(saved: bool) -> None:
    """Loaded into a pruner that was prepared the other way, it decides; the pruned models are then the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 2))
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    pruner = masked(first, {"0.weight": [1, 4]}, prune_bias=saved)
    other = masked(second, {"0.weight": [0]}, prune_bias=not saved)
    x = torch.randn(3, 4)
    assert not torch.equal(first(x), second(x))
    other.load_state_dict(pruner.state_dict())
    assert torch.equal(second(x), first(x))
    pruner.prune()
    other.prune()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
