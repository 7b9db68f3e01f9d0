import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.pruning._experimental import pruner as original
from torch.nn.utils.parametrize import is_parametrized

from secateur import ao
from secateur.errors import SecateurError, SecateurWarning

KINDS = [(ao.LSTMSaliencyPruner, nn.LSTM, 4), (ao.GRUSaliencyPruner, nn.GRU, 3)]


def masks(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: stack[0].mask for name, stack in module.parametrizations.items()}


def weights_of(module: nn.Module, prefix: str = "0.") -> list[dict[str, Any]]:
    return [{"tensor_fqn": prefix + name} for name, _ in module.named_parameters() if name.startswith("weight")]


@pytest.mark.filterwarnings("ignore::secateur.SecateurWarning")
@pytest.mark.parametrize("level", [0.0, 0.3, 0.5, 1.0])
def test_each_gate_loses_its_own_least_rows_as_in_the_original(level: float) -> None:
    ours = nn.Sequential(nn.LSTM(3, 8, num_layers=2, bidirectional=True))
    theirs = copy.deepcopy(ours)
    config = weights_of(ours[0])
    for package, model in ((ao, ours), (original, theirs)):
        pruner = package.LSTMSaliencyPruner({"sparsity_level": level})
        pruner.prepare(model, copy.deepcopy(config))
        pruner.step()
    assert masks(ours[0]).keys() == masks(theirs[0]).keys()
    for name, mask in masks(ours[0]).items():
        assert torch.equal(mask, masks(theirs[0])[name]), name
        assert (mask.view(4, 8).sum(1) == 8 - int(8 * level)).all()
    x = torch.randn(5, 2, 3)
    assert torch.equal(ours(x)[0], theirs(x)[0])


def test_gates_by_eye() -> None:
    model = nn.Sequential(nn.GRU(1, 2, bias=False))
    model[0].weight_ih_l0.data = torch.tensor([[1.0], [2.0], [4.0], [-3.0], [0.0], [5.0]])
    pruner = ao.GRUSaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(model, [{"tensor_fqn": "0.weight_ih_l0"}])
    with pytest.warns(SecateurWarning, match=r"0\.weight_ih_l0.*coherent=True"):
        pruner.step()
    assert masks(model[0])["weight_ih_l0"].view(3, 2).tolist() == [
        [False, True],
        [True, False],
        [False, True],
    ]


@pytest.mark.parametrize(("pruner_type", "layer_type", "gates"), KINDS)
def test_coherent_masks_the_units_with_the_least_weight_in_all_gates_and_both_matrices(
    pruner_type: Any, layer_type: Any, gates: int
) -> None:
    layer = layer_type(3, 6, num_layers=2, bidirectional=True)
    model = nn.Sequential(layer)
    norms = {
        name: p.detach().flatten(1).abs().sum(1).view(gates, 6).sum(0)
        for name, p in layer.named_parameters()
        if name.startswith("weight")
    }
    pruner = pruner_type({"sparsity_level": 0.5}, coherent=True)
    pruner.prepare(model)
    pruner.step()
    for suffix in ("l0", "l1", "l0_reverse", "l1_reverse"):
        saliency = norms[f"weight_ih_{suffix}"] + norms[f"weight_hh_{suffix}"]
        expected = torch.ones(6, dtype=torch.bool)
        expected[saliency.argsort()[:3]] = False
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            mask = masks(layer)[f"{part}_{suffix}"]
            assert torch.equal(mask, expected.repeat(gates)), (part, suffix)


@pytest.mark.parametrize(("pruner_type", "layer_type", "gates"), KINDS)
def test_a_unit_masked_coherently_is_silent_and_can_be_cut_exactly(
    pruner_type: Any, layer_type: Any, gates: int
) -> None:
    layer = layer_type(3, 6, batch_first=True)
    model = nn.Sequential(layer)
    pruner = pruner_type({"sparsity_level": 0.5}, coherent=True)
    pruner.prepare(model)
    pruner.step()
    kept = masks(layer)["weight_ih_l0"].view(gates, 6)[0]
    x = torch.randn(2, 7, 3)
    output = model(x)[0]
    assert (output[..., ~kept] == 0).all()
    assert (output[..., kept] != 0).all()

    small = layer_type(3, 3, batch_first=True)
    rows = kept.repeat(gates)
    small.load_state_dict(
        {
            "weight_ih_l0": layer.weight_ih_l0[rows],
            "weight_hh_l0": layer.weight_hh_l0[rows][:, kept],
            "bias_ih_l0": layer.bias_ih_l0[rows],
            "bias_hh_l0": layer.bias_hh_l0[rows],
        }
    )
    torch.testing.assert_close(small(x)[0], output[..., kept])

    pruner.squash_mask()
    assert not is_parametrized(layer)
    torch.testing.assert_close(model(x)[0], output)


def test_coherent_with_projections_and_without_biases() -> None:
    layer = nn.LSTM(3, 6, proj_size=2, bias=False)
    pruner = ao.LSTMSaliencyPruner({"sparsity_level": 0.5}, coherent=True)
    pruner.prepare(nn.Sequential(layer))
    pruner.step()
    assert set(masks(layer)) == {"weight_ih_l0", "weight_hh_l0"}
    layer(torch.randn(4, 1, 3))


def test_biases_may_stay() -> None:
    layer = nn.LSTM(3, 6)
    pruner = ao.LSTMSaliencyPruner({"sparsity_level": 0.5, "prune_bias": False}, coherent=True)
    pruner.prepare(nn.Sequential(layer))
    assert set(masks(layer)) == {"weight_ih_l0", "weight_hh_l0"}


def test_cells_are_pruned_like_layers() -> None:
    cell = nn.GRUCell(3, 4)
    pruner = ao.GRUSaliencyPruner({"sparsity_level": 0.5}, coherent=True)
    pruner.prepare(nn.Sequential(cell), weights_of(cell))
    pruner.step()
    assert set(masks(cell)) == {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}
    assert (cell(torch.randn(1, 3)) == 0).sum() == 2


def test_masks_of_bias_and_weight_stay_together_when_the_model_is_converted() -> None:
    layer = nn.LSTM(3, 4)
    pruner = ao.LSTMSaliencyPruner({"sparsity_level": 0.5}, coherent=True)
    pruner.prepare(nn.Sequential(layer))
    layer.double()
    pruner.step()
    assert (layer.bias_ih_l0 == 0).sum() == 8


def test_coherent_masks_follow_the_level_up_and_down_together() -> None:
    layer = nn.LSTM(3, 8)
    pruner = ao.LSTMSaliencyPruner({"sparsity_level": 0.0}, coherent=True)
    pruner.prepare(nn.Sequential(layer))
    for level in (0.25, 0.75, 0.5, 1.0, 0.0):
        for group in pruner.groups:
            group["sparsity_level"] = level
        pruner.step()
        units = [mask.view(4, 8) for mask in masks(layer).values()]
        assert all(torch.equal(unit, units[0][:1].expand(4, 8)) for unit in units)
        assert int(units[0][0].sum()) == 8 - int(8 * level)


def test_a_unit_that_is_gone_in_one_gate_counts_as_gone() -> None:
    layer = nn.LSTM(1, 2, bias=False)
    for parameter in layer.parameters():
        parameter.data = torch.tensor([[9.0], [1.0]]).repeat(4, parameter.shape[1])
    pruner = ao.LSTMSaliencyPruner({"sparsity_level": 0.5}, coherent=True)
    pruner.prepare(nn.Sequential(layer))
    masks(layer)["weight_hh_l0"][0] = False
    pruner.step()
    assert all(mask.tolist() == [False, True] * 4 for mask in masks(layer).values())


# -- warnings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pruner_type", "layer_type", "gates"), KINDS)
def test_disagreeing_gates_are_told_once_while_training_and_again_before_removal(
    pruner_type: Any, layer_type: Any, gates: int
) -> None:
    pruner = pruner_type({"sparsity_level": 0.0})
    pruner.prepare(nn.Sequential(layer_type(3, 8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner.step()
    for group in pruner.groups:
        group["sparsity_level"] = 0.5
    with pytest.warns(SecateurWarning, match="coherent=True") as caught:
        pruner.step()
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner.step()
    with pytest.warns(SecateurWarning, match="different units"):
        pruner.prune()


def test_agreeing_gates_are_not_warned_of() -> None:
    layer = nn.LSTM(1, 2, bias=False)
    for parameter in layer.parameters():
        parameter.data = torch.tensor([[1.0], [2.0]]).repeat(4, parameter.shape[1])
    pruner = ao.LSTMSaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(nn.Sequential(layer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner.step()
    assert masks(layer)["weight_ih_l0"].tolist() == [False, True] * 4


def test_matrices_that_disagree_are_warned_of_too() -> None:
    layer = nn.LSTM(1, 2, bias=False)
    layer.weight_ih_l0.data = torch.tensor([[1.0], [2.0]]).repeat(4, 1)
    layer.weight_hh_l0.data = torch.tensor([[2.0], [1.0]]).repeat(4, 2)
    pruner = ao.LSTMSaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(nn.Sequential(layer))
    with pytest.warns(SecateurWarning, match="coherent"):
        pruner.step()


def test_a_warning_made_an_error_leaves_the_masks_as_they_were(unchanged: Any) -> None:
    model = nn.Sequential(nn.LSTM(3, 8))
    pruner = ao.LSTMSaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(model)
    for _ in range(2):
        with unchanged(model), pytest.raises(SecateurWarning):  # an error by the project's pytest settings
            pruner.step()


# -- bad input ----------------------------------------------------------------------------------------------


def test_rows_must_divide_into_gates(unchanged: Any) -> None:
    model = nn.Sequential(nn.GRU(2, 3), nn.Linear(2, 6))
    with unchanged(model), pytest.raises(SecateurError, match=r"1\.weight: 6 rows.*4 gates"):
        ao.LSTMSaliencyPruner({"sparsity_level": 0.5}).prepare(model, [{"tensor_fqn": "1.weight"}])


@pytest.mark.parametrize(
    "names", [["weight_ih_l0"], ["weight_hh_l0"], ["weight_ih_l0", "weight_hh_l0", "weight_hr_l0"]]
)
def test_coherent_wants_both_matrices_and_nothing_else(names: list[str], unchanged: Any) -> None:
    model = nn.Sequential(nn.LSTM(2, 8, proj_size=4))
    pruner = ao.LSTMSaliencyPruner({"sparsity_level": 0.5}, coherent=True)
    with unchanged(model), pytest.raises(SecateurError, match="weight_ih and weight_hh"):
        pruner.prepare(model, [{"tensor_fqn": f"0.{name}"} for name in names])


def test_coherent_wants_one_level(unchanged: Any) -> None:
    model = nn.Sequential(nn.LSTM(2, 8))
    pruner = ao.LSTMSaliencyPruner({"sparsity_level": 0.5}, coherent=True)
    pruner.prepare(model)
    pruner.groups[1]["sparsity_level"] = 0.25
    with unchanged(model), pytest.raises(ValueError, match="different sparsity levels"):
        pruner.step()
