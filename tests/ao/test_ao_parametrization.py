import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from secateur import ao
from secateur.errors import SecateurError


def test_fake_sparsity_multiplies_by_its_mask() -> None:
    layer = nn.Linear(3, 3, bias=False)
    register_parametrization(layer, "weight", ao.FakeSparsity(torch.eye(3)))
    layer.parametrizations.weight.original.data.fill_(2.0)
    assert torch.equal(layer.weight, 2 * torch.eye(3))


def test_row_mask_multiplies_rows_of_any_tensor() -> None:
    rows = ao.FakeStructuredSparsity(torch.tensor([True, False]))
    assert torch.equal(rows(torch.ones(2)), torch.tensor([1.0, 0.0]))
    assert torch.equal(rows(torch.ones(2, 3, 1, 1)).flatten(1), torch.tensor([[1.0] * 3, [0.0] * 3]))


@pytest.mark.parametrize(
    "parametrization",
    [
        ao.FakeSparsity(torch.ones(2, 3)),
        ao.FakeStructuredSparsity(torch.ones(3)),
        ao.FakeStructuredSparsity(torch.ones(2, 1)),
    ],
)
def test_a_mask_of_another_shape_is_an_error(parametrization: nn.Module) -> None:
    with pytest.raises(AssertionError, match="mask") as caught:
        parametrization(torch.ones(2, 2))
    assert isinstance(caught.value, SecateurError)


@pytest.mark.parametrize("kind", [ao.FakeSparsity, ao.FakeStructuredSparsity])
def test_a_mask_that_is_no_tensor_is_an_error(kind: type) -> None:
    with pytest.raises(TypeError, match=kind.__name__) as caught:
        kind([1, 0])
    assert isinstance(caught.value, SecateurError)


def test_masks_stay_out_of_the_models_state_dict_which_loads_strictly() -> None:
    masked, other = nn.Linear(2, 2), nn.Linear(2, 2)
    register_parametrization(masked, "weight", ao.FakeSparsity(torch.eye(2)))
    register_parametrization(other, "weight", ao.FakeSparsity(torch.ones(2, 2)))
    state = masked.state_dict()
    assert set(state) == {"bias", "parametrizations.weight.original"}
    other.load_state_dict(state)
    assert torch.equal(other.parametrizations.weight.original, masked.parametrizations.weight.original)
    assert torch.equal(other.parametrizations.weight[0].mask, torch.ones(2, 2))


def test_module_contains_param_looks_at_every_tensor_and_type() -> None:
    layer = nn.Linear(2, 2)
    assert not ao.module_contains_param(layer, ao.FakeSparsity)
    register_parametrization(layer, "weight", nn.Identity())
    register_parametrization(layer, "bias", ao.FakeSparsity(torch.ones(2)))
    assert ao.module_contains_param(layer, ao.FakeSparsity)
    assert not ao.module_contains_param(layer, ao.FakeStructuredSparsity)


LAYERS = [
    (nn.Linear(3, 4), (3,)),
    (nn.Linear(3, 4), (5, 3)),
    (nn.Linear(3, 4), (2, 4, 3)),  # the original adds the bias along dim 1 here
    (nn.Conv1d(3, 4, 2), (2, 3, 5)),
    (nn.Conv1d(3, 4, 2), (3, 5)),
    (nn.Conv2d(3, 4, 2), (2, 3, 4, 4)),
    (nn.Conv2d(3, 4, 2), (3, 4, 4)),
    (nn.Conv3d(3, 4, 2), (2, 3, 2, 3, 3)),
]


@pytest.mark.parametrize("prune_bias", [True, False])
@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_bias_hook_adds_the_bias_along_the_channels(layer: nn.Module, shape: tuple[int, ...], prune_bias: bool) -> None:
    layer = copy.deepcopy(layer)
    mask = torch.tensor([True, False, True, False])
    x = torch.randn(shape)
    expected = copy.deepcopy(layer)
    if prune_bias:
        expected.bias.data *= mask
    layer._bias, layer.bias = nn.Parameter(layer.bias.detach().clone()), None
    layer.register_forward_hook(ao.BiasHook(ao.FakeStructuredSparsity(mask), prune_bias))
    before = layer._bias.detach().clone()
    torch.testing.assert_close(layer(x), expected(x))
    assert torch.equal(layer._bias, before)


def test_bias_trains_through_the_hook_where_its_row_is_kept() -> None:
    layer = nn.Linear(2, 2)
    layer._bias, layer.bias = nn.Parameter(torch.zeros(2)), None
    layer.register_forward_hook(ao.BiasHook(ao.FakeStructuredSparsity(torch.tensor([True, False])), True))
    nn.functional.mse_loss(layer(torch.ones(1, 2)), torch.ones(1, 2) * 9).backward()
    assert layer._bias.grad[0] != 0
    assert layer._bias.grad[1] == 0


def test_bias_hook_without_a_bias_returns_the_output() -> None:
    output = torch.ones(1, 2)
    hook = ao.BiasHook(ao.FakeStructuredSparsity(torch.ones(2)), True)
    assert hook(nn.Linear(2, 2, bias=False), (), output) is output
