import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.pruning._experimental import pruner as original
from torch.nn.utils.parametrize import is_parametrized

from secateur import ao
from secateur.errors import SecateurError


class SecondRow(ao.BaseStructuredSparsifier):
    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        module.parametrizations[tensor_name][0].mask[1] = False


class TheirSecondRow(original.BaseStructuredSparsifier):
    update_mask = SecondRow.update_mask


def make_model(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=bias),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, padding=1, bias=bias),
        nn.Flatten(),
        nn.Linear(12, 5, bias=bias),
    )


X = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prune_bias", [True, False])
def test_a_prepared_model_computes_what_the_originals_does(bias: bool, prune_bias: bool) -> None:
    ours = make_model(bias)
    theirs = copy.deepcopy(ours)
    dense = ours(X)
    mine, his = SecondRow({"prune_bias": prune_bias}), TheirSecondRow({"prune_bias": prune_bias})
    for sparsifier, model in ((mine, ours), (his, theirs)):
        sparsifier.prepare(model, None)
    torch.testing.assert_close(ours(X), dense)
    assert [g["tensor_fqn"] for g in mine.groups] == [g["tensor_fqn"] for g in his.groups]
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for sparsifier in (mine, his):
        sparsifier.step()
    assert torch.equal(ours(X), theirs(X))
    assert not torch.equal(ours(X), dense)


def test_the_bias_moves_and_stays_the_same_parameter() -> None:
    model = make_model()
    bias = model[0].bias
    pruner = SecondRow({"prune_bias": False})
    pruner.prepare(model, [{"tensor_fqn": "0.weight"}])
    assert model[0]._bias is bias
    assert model[0].bias is None
    assert model[0].prune_bias is False
    assert [type(hook) for hook in model[0]._forward_hooks.values()] == [ao.BiasHook]
    assert model[0].parametrizations.weight[0].mask.dtype == torch.bool
    assert model[4].bias is not None
    pruner.squash_mask()
    assert model[0].bias is bias
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("prune_bias", [True, False])
def test_squash_leaves_an_ordinary_model_with_the_same_output(prune_bias: bool) -> None:
    model, fresh = make_model(), make_model()
    parameters = set(model.parameters())
    pruner = SecondRow({"prune_bias": prune_bias})
    pruner.prepare(model)
    pruner.step()
    masked = model(X)
    pruner.squash_mask(params_to_keep=("prune_bias",))
    torch.testing.assert_close(model(X), masked)
    assert set(model.parameters()) == parameters
    assert (model[0].bias[1] == 0) == prune_bias
    assert model[0].sparse_params == {"prune_bias": prune_bias}
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(X), masked)


def test_weights_and_biases_train_while_masked() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # made before: the parameters stay the same objects
    pruner = SecondRow({})
    pruner.prepare(model)
    pruner.step()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    model(X).square().sum().backward()
    optimizer.step()
    moved = {
        name: (value != before[name]).flatten(1).any(1) if value.dim() > 1 else value != before[name]
        for name, value in model.named_parameters()
    }
    for name, rows in moved.items():
        assert not rows[1], name
        assert rows[0], name


def test_every_kind_of_layer_gets_masks_without_a_config() -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(2, 2),
            "conv1": nn.Conv1d(2, 2, 1),
            "conv3": nn.Conv3d(2, 2, 1),
            "lstm": nn.LSTM(2, 2, num_layers=2, bidirectional=True),
            "norm": nn.BatchNorm1d(2),
        }
    )
    pruner = SecondRow({})
    pruner.prepare(model)
    names = {group["tensor_fqn"] for group in pruner.groups}
    recurrent = {f"lstm.weight_{part}_l{k}{way}" for part in ("ih", "hh") for k in (0, 1) for way in ("", "_reverse")}
    assert names == {"linear.weight", "conv1.weight", "conv3.weight"} | recurrent


def test_make_config_takes_other_types() -> None:
    pruner = SecondRow({})
    pruner.make_config_from_model(make_model(), {nn.Linear})
    assert pruner.config == [{"tensor_fqn": "4.weight"}]


def test_attention_keeps_its_bias_although_its_projection_is_never_called() -> None:
    attention = nn.MultiheadAttention(4, 2)
    attention.out_proj.bias.data.normal_()
    x = torch.randn(3, 1, 4)
    expected = attention(x, x, x)[0] * torch.tensor([1.0, 0.0, 1.0, 1.0])
    pruner = SecondRow({})
    pruner.prepare(attention, [{"tensor_fqn": "out_proj.weight"}])
    pruner.step()
    torch.testing.assert_close(attention(x, x, x)[0], expected)
    pruner.squash_mask()
    assert not is_parametrized(attention.out_proj)
    torch.testing.assert_close(attention(x, x, x)[0], expected)


def test_state_dict_round_trip_attaches_hooks_too() -> None:
    model = make_model()
    pruner = SecondRow({})
    pruner.prepare(model)
    pruner.step()
    twin = make_model()
    other = SecondRow({})
    other.prepare(twin, [{"tensor_fqn": "0.weight"}])
    other.load_state_dict(pruner.state_dict())
    assert [type(hook) for hook in twin[4]._forward_hooks.values()] == [ao.BiasHook]
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(X), model(X))
    assert other.state == pruner.state


def test_masks_of_another_shape_change_nothing(unchanged: Any) -> None:
    model = make_model()
    pruner = SecondRow({})
    pruner.prepare(model)
    state = copy.deepcopy(pruner.state_dict())
    state["state"]["4.weight"]["mask"] = torch.ones(4, dtype=torch.bool)
    state["state"]["0.weight"]["mask"][0] = False
    with unchanged(model), pytest.raises(SecateurError, match=r"4\.weight.*\(4,\).*\(5,\)"):
        pruner.load_state_dict(state)


@pytest.mark.parametrize("mask", [torch.ones(3), torch.ones(4, 1), torch.ones(4, 1, 3, 3)])
def test_a_first_mask_of_another_shape_changes_nothing(mask: torch.Tensor, unchanged: Any) -> None:
    model = make_model()
    with unchanged(model), pytest.raises(AssertionError, match=r"0\.weight.*one value per row") as caught:
        SecondRow({}).prepare(model, [{"tensor_fqn": "4.weight"}, {"tensor_fqn": "0.weight", "mask": mask}])
    assert isinstance(caught.value, SecateurError)


def test_rows_are_masked_by_one_pruner_at_a_time(unchanged: Any) -> None:
    model = make_model()
    first, second = SecondRow({}), SecondRow({})
    first.prepare(model, [{"tensor_fqn": "0.weight"}])
    with unchanged(model), pytest.raises(SecateurError, match=r"0\.weight.*another pruner"):
        second.prepare(model, [{"tensor_fqn": "4.weight"}, {"tensor_fqn": "0.weight"}])
    first.squash_mask()
    second.prepare(model, [{"tensor_fqn": "4.weight"}, {"tensor_fqn": "0.weight"}])


def test_a_bias_that_cannot_be_moved_is_an_error(unchanged: Any) -> None:
    model = make_model()
    nn.utils.parametrize.register_parametrization(model[0], "bias", nn.Identity())
    with unchanged(model), pytest.raises(SecateurError, match=r"0\.weight.*cannot be attached"):
        SecondRow({}).prepare(model, [{"tensor_fqn": "4.weight"}, {"tensor_fqn": "0.weight"}])


def test_a_deep_copy_of_a_prepared_model_has_hooks_of_its_own() -> None:
    model = make_model()
    pruner = SecondRow({})
    pruner.prepare(model)
    twin = copy.deepcopy(pruner)
    twin.step()
    dense = make_model()
    dense.load_state_dict(
        {
            name.replace("_bias", "bias").replace("parametrizations.weight.original", "weight"): value
            for name, value in model.state_dict().items()
        }
    )
    torch.testing.assert_close(model(X), dense(X))
    dense[0].weight.data[1], dense[0].bias.data[1] = 0, 0
    dense[2].weight.data[1], dense[2].bias.data[1] = 0, 0
    dense[4].weight.data[1], dense[4].bias.data[1] = 0, 0
    torch.testing.assert_close(twin.model(X), dense(X))


def test_prune_before_prepare_says_so() -> None:
    with pytest.raises(SecateurError, match="prepare"):
        SecondRow({}).prune()


def test_the_base_is_abstract_and_keeps_user_patterns() -> None:
    with pytest.raises(TypeError, match=r"BaseStructuredSparsifier.*update_mask"):
        ao.BaseStructuredSparsifier({})
    patterns = {(nn.Linear, nn.Linear): lambda first, second: None}
    assert SecondRow({}, patterns).patterns == patterns
    assert SecondRow(None).defaults == {}
