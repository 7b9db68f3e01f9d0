"""A bias where the class gives none, kept through cuts, copies, failures and plans that compose."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import secateur as sec
from secateur.pipeline.apply import plan_of
from secateur.state.transaction import untouched
from secateur.surgery import carry_out
from secateur.surgery.bias import added_biases, ensure_bias, with_added

EXAMPLE = torch.zeros(1, 4)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))


@pytest.mark.parametrize(
    ("layer", "outputs"),
    [
        (nn.Linear(3, 5, bias=False), 5),
        (nn.Conv1d(4, 6, 3, groups=2, bias=False), 6),
        (nn.Conv3d(2, 3, 1, bias=False), 3),
        (nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), 6),
        (nn.Linear(3, 5, bias=False).half().requires_grad_(False), 5),
    ],
    ids=["linear", "grouped conv1d", "conv3d", "transposed", "frozen half"],
)
def test_a_bias_of_zeros_like_the_weight(layer, outputs):
    bias = ensure_bias(nn.Sequential(layer), "0")
    assert bias is layer.bias
    assert bias is ensure_bias(layer, "")
    assert torch.equal(bias, torch.zeros(outputs, dtype=layer.weight.dtype))
    assert bias.requires_grad == layer.weight.requires_grad
    assert added_biases(layer) == ("",)


def test_a_bias_that_was_there_is_not_added():
    layer = nn.Linear(2, 2)
    assert ensure_bias(layer, "") is layer.bias
    assert added_biases(layer) == ()


def test_only_layers_that_add_a_bias_to_their_outputs():
    model = nn.Sequential(nn.LayerNorm(2, bias=False), nn.Linear(2, 2))
    parametrize.register_parametrization(model[1], "bias", nn.Identity())
    for name, words in (("0", "is a LayerNorm"), ("2", "is no module"), ("__class__", "no module"), ("1", "computed")):
        with pytest.raises(sec.ApplyError, match=words):
            ensure_bias(model, name)


def test_copies_know_it():
    model = net()
    ensure_bias(model, "2")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert added_biases(copied) == ("2",)
    model[2].bias = None
    assert added_biases(model) == ()


def test_undoing_a_cut_takes_it_away():
    model = net()
    before = dict(model.named_parameters())
    plan = sec.plan(sec.trace(model, EXAMPLE), sec.Ratio(0.5))
    with untouched(model):
        carry_out(model, plan)
        ensure_bias(model, "0")
    assert dict(model.named_parameters()) == before
    assert added_biases(model) == ()
    assert model[0].bias is None


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_the_plan_is_as_if_it_had_been_there(when):
    """The bias of a layer keeps what the rows of its weight keep, whenever it was added."""
    model = net()
    for i in range(2):
        if (when, i) in (("before", 0), ("between", 1)):
            ensure_bias(model, "0")
        sec.apply(model, sec.plan(sec.trace(model, EXAMPLE), sec.Ratio(0.5)))
    ensure_bias(model, "0")
    plan = with_added(plan_of(model), model)
    assert plan.keep["0.bias"][0].tolist() == plan.keep["0.weight"][0].tolist()
    assert plan.shapes["0.bias"] == (8,)
    fresh = net()
    ensure_bias(fresh, "0")
    sec.apply(fresh, plan, verify=False)
    assert fresh[0].bias.shape == model[0].bias.shape == (2,)


def test_transposed_convolutions_keep_the_rows_of_their_second_dimension():
    model = nn.Sequential(nn.ConvTranspose1d(2, 4, 2, bias=False), nn.ReLU(), nn.Conv1d(4, 2, 1))
    sec.apply(model, sec.plan(sec.trace(model, torch.zeros(1, 2, 3)), sec.Ratio(0.5)))
    ensure_bias(model, "0")
    plan = with_added(plan_of(model), model)
    assert plan.keep["0.bias"][0].tolist() == plan.keep["0.weight"][1].tolist()
    assert plan.shapes["0.bias"] == (4,)
