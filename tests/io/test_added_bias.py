"""Files of models whose layers were given a bias that their class does not give them."""

import pytest
import torch
from torch import nn

import secateur as sec
from secateur import ao
from secateur.pipeline.apply import plan_of
from secateur.surgery.bias import added_biases, ensure_bias


def net() -> nn.Sequential:
    first = nn.Conv2d(2, 8, 3)
    first.bias.data.abs_().add_(0.1)  # so that a masked channel still carries something
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(8, 6, 3, bias=False), nn.Conv2d(6, 2, 1, bias=False))


X = torch.randn(2, 2, 7, 7, generator=torch.Generator().manual_seed(0))


def masked(model: nn.Module, rows: dict[str, list[int]]) -> nn.Module:
    class Chosen(ao.BaseStructuredSparsifier):
        def update_mask(self, module, tensor_name, tensor_fqn, **kwargs):
            module.parametrizations[tensor_name][0].mask[rows[tensor_fqn]] = False

    pruner = Chosen({"prune_bias": False})
    pruner.prepare(model, [{"tensor_fqn": name} for name in rows])
    pruner.step()
    want = model(X)
    pruner.prune(example=X)
    torch.testing.assert_close(model(X), want, rtol=1e-4, atol=1e-5)
    return model


def same_after_loading(model: nn.Module, path) -> nn.Module:
    sec.save(model, path)
    fresh = sec.load(path, net())
    assert torch.equal(fresh(X), model(X))
    assert added_biases(fresh) == added_biases(model) != ()
    return fresh


def test_a_constant_that_went_into_a_bias_that_was_not_there(tmp_path):
    model = masked(net(), {"0.weight": [1, 5]})
    assert added_biases(model) == ("2",)
    assert model[2].bias.any()
    same_after_loading(model, tmp_path / "a")


def test_its_layer_is_cut_too(tmp_path):
    model = masked(net(), {"0.weight": [1, 5], "2.weight": [0]})
    assert model[2].bias.shape == (5,)
    same_after_loading(model, tmp_path / "a")


def test_cut_again_before_and_after_loading(tmp_path):
    model = masked(net(), {"0.weight": [1, 5], "2.weight": [0]})
    sec.apply(model, sec.plan(sec.trace(model, X), sec.Ratio(0.4)))
    fresh = same_after_loading(model, tmp_path / "a")
    assert fresh[2].bias.shape == fresh[2].weight.shape[:1] == (3,)
    sec.apply(fresh, sec.plan(sec.trace(fresh, X), sec.Ratio(0.5)))
    again = same_after_loading(fresh, tmp_path / "b")
    assert plan_of(again).keep["2.bias"][0].tolist() == plan_of(again).keep["2.weight"][0].tolist()


def test_a_model_that_was_never_cut(tmp_path):
    model = net()
    with torch.no_grad():
        ensure_bias(model, "3").fill_(0.5)
    same_after_loading(model, tmp_path / "a")


def test_a_full_size_model_that_has_a_bias_there(tmp_path):
    sec.save(masked(net(), {"0.weight": [1]}), tmp_path / "a")
    other = net()
    other[2] = nn.Conv2d(8, 6, 3)
    with pytest.raises(sec.FileError, match="a bias is to be added to 2, which has one"):
        sec.load(tmp_path / "a", other)
