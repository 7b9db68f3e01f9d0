import pytest
from torch import nn

from secateur import ao


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 4)))


def test_names_and_modules_are_inverse(model: nn.Sequential) -> None:
    for name, module in model.named_modules():
        assert ao.module_to_fqn(model, module) == name
        assert ao.fqn_to_module(model, name) is module


def test_prefix_stands_before_a_name_that_is_not_empty(model: nn.Sequential) -> None:
    assert ao.module_to_fqn(model, model[1][1], ".") == ".1.1"
    assert ao.module_to_fqn(model, model, ".") == ""


def test_strangers_have_no_name_and_unknown_names_no_module(model: nn.Sequential) -> None:
    assert ao.module_to_fqn(model, nn.Linear(2, 3)) is None
    assert ao.fqn_to_module(model, "1.7.weight") is None
    assert ao.fqn_to_module(None, "a.b") is None
    assert ao.fqn_to_module(model, "training") is None  # neither a module nor a tensor


def test_tensors_are_found_by_name(model: nn.Sequential) -> None:
    for name, parameter in model.named_parameters():
        assert ao.fqn_to_module(model, name) is parameter


@pytest.mark.parametrize(
    ("fqn", "module_fqn", "tensor_name"),
    [("1.1.bias", "1.1", "bias"), ("weight", "", "weight"), ("a.b.c", "a.b", "c")],
)
def test_arg_info_splits_the_name(model: nn.Sequential, fqn: str, module_fqn: str, tensor_name: str) -> None:
    info = ao.get_arg_info_from_tensor_fqn(model, fqn)
    assert info == {
        "module_fqn": module_fqn,
        "module": ao.fqn_to_module(model, module_fqn),
        "tensor_name": tensor_name,
        "tensor_fqn": fqn,
    }
    assert (info["module"] is None) == (fqn == "a.b.c")
