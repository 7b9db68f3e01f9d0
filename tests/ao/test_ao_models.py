"""Whole models: masks on every layer, trained, saved, made final."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from secateur import ao


def resnet18() -> tuple[nn.Module, torch.Tensor]:
    import torchvision

    return torchvision.models.resnet18(num_classes=10), torch.randn(2, 3, 32, 32)


def vit() -> tuple[nn.Module, torch.Tensor]:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    return model, torch.randn(2, 3, 32, 32)


# One to save, and one with other settings to load into.
SPARSIFIERS = {
    "saliency": (ao.SaliencyPruner({"sparsity_level": 0.5}), ao.SaliencyPruner({"prune_bias": False})),
    "saliency, biases kept": (
        ao.SaliencyPruner({"sparsity_level": 0.5, "prune_bias": False}),
        ao.SaliencyPruner({}),
    ),
    "fpgm": (ao.FPGMPruner(0.5), ao.FPGMPruner(0.1)),
    "2:4": (ao.WeightNormSparsifier(1.0, zeros_per_block=2), ao.WeightNormSparsifier()),
}


@pytest.mark.parametrize("make", [resnet18, vit])
@pytest.mark.parametrize("kind", SPARSIFIERS)
def test_masked_squashed_and_reloaded_models_agree(make: Any, kind: str) -> None:
    model, x = make()
    model.eval()
    sparsifier, other = copy.deepcopy(SPARSIFIERS[kind])
    fresh = copy.deepcopy(model)
    dense = model(x)
    sparsifier.prepare(model)
    torch.testing.assert_close(model(x), dense, rtol=1e-4, atol=1e-4)
    sparsifier.step()
    masked = model(x)
    assert not torch.allclose(masked, dense, rtol=1e-2, atol=1e-2)
    assert len(sparsifier.groups) == sum(type(m) in sparsifier._supported for m in fresh.modules())

    resumed = copy.deepcopy(fresh)
    other.prepare(resumed)
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(sparsifier.state_dict())
    torch.testing.assert_close(resumed(x), masked)

    sparsifier.squash_mask()
    torch.testing.assert_close(model(x), masked, rtol=1e-4, atol=1e-4)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(x), masked, rtol=1e-4, atol=1e-4)


def test_training_with_a_schedule_keeps_masked_rows_at_zero() -> None:
    model, x = resnet18()
    pruner = ao.FPGMPruner(0.5)
    pruner.prepare(model)
    scheduler = ao.CubicSL(pruner, delta_t=1, total_t=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(3):
        pruner.step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.tensor([1, 2])).backward()
        optimizer.step()
        scheduler.step()
    pruner.squash_mask()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 4:
            zero = parameter.flatten(1).eq(0).all(1)
            assert int(zero.sum()) == parameter.shape[0] // 2, name
