"""Every kind of tensor that a model may hold goes into a file and comes back, or is refused by name."""

import pytest
import torch
from safetensors import safe_open
from torch import nn

import secateur as sec
from secateur import FileError
from secateur.io import load, save


class Holder(nn.Module):
    """A module that holds one buffer, or one parameter."""

    def __init__(self, value: torch.Tensor, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("value", value, persistent=persistent)


def there_and_back(model: nn.Module, fresh: nn.Module, path) -> nn.Module:
    save(model, path / "file")
    return load(path / "file", fresh)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(4, dtype=torch.int8),
        torch.arange(4).to(torch.uint16),
        torch.tensor([1.0, float("nan"), -0.0, float("inf")], dtype=torch.float16),
        torch.randn(2, 3, dtype=torch.float64),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(2, 2).to(torch.float8_e4m3fn),
        torch.empty(0, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(10)[2:8:2],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.stride()}",
)
def test_a_buffer_of_any_kind_comes_back(value, tmp_path):
    fresh = Holder(torch.zeros_like(value))
    strides = fresh.value.stride()
    there_and_back(Holder(value), fresh, tmp_path)
    want = value.resolve_conj()
    assert fresh.value.dtype == value.dtype
    assert fresh.value.stride() == strides
    assert fresh.value.contiguous().flatten().view(torch.uint8).equal(want.contiguous().flatten().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_in_another_precision(dtype, tmp_path):
    net = nn.Linear(3, 2).to(dtype)
    fresh = there_and_back(net, nn.Linear(3, 2).to(dtype), tmp_path)
    assert torch.equal(fresh.weight, net.weight)


def test_shared_modules_and_shared_tensors_are_stored_once(tmp_path):
    def build():
        layer = nn.Linear(4, 4)
        return nn.ModuleList([layer, layer, nn.Linear(4, 4)])

    net = build()
    fresh = there_and_back(net, build(), tmp_path)
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert set(file.keys()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert fresh[1].weight is fresh[0].weight
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), fresh.parameters(), strict=True))


def test_tensors_that_share_memory_without_being_one(tmp_path):
    class Views(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.whole = nn.Parameter(base)
            self.register_buffer("part", self.whole.detach()[:2])
            self.same = nn.Parameter(self.whole.detach())

    net = Views(torch.arange(4.0))
    fresh = there_and_back(net, Views(torch.zeros(4)), tmp_path)
    assert fresh.whole.tolist() == fresh.same.tolist() == [0, 1, 2, 3]
    assert fresh.part.tolist() == [0, 1]


def test_a_part_of_a_large_memory_is_stored_alone(tmp_path):
    save(Holder(torch.zeros(1_000_000)[:4]), tmp_path / "file")
    assert (tmp_path / "file").stat().st_size < 2000


def test_buffers_that_are_not_persistent_stay_the_models_own(tmp_path):
    fresh = there_and_back(Holder(torch.ones(2), persistent=False), Holder(torch.zeros(2), persistent=False), tmp_path)
    assert fresh.value.tolist() == [0, 0]


def test_parametrizations_go_along(tmp_path):
    def build():
        return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))

    net = build()
    fresh = there_and_back(net, build(), tmp_path)
    assert torch.equal(fresh.weight, net.weight)


class Extra(nn.Module):
    """A module with state that is neither parameter nor buffer."""

    def __init__(self, state):
        super().__init__()
        self.state = state
        self.layer = nn.Linear(2, 2)

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def test_extra_state_that_is_a_tensor(tmp_path):
    fresh = there_and_back(nn.Sequential(Extra(torch.ones(3))), nn.Sequential(Extra(torch.zeros(1))), tmp_path)
    assert fresh[0].state.tolist() == [1, 1, 1]


def refused(model, path, words):
    with pytest.raises(FileError, match=words):
        save(model, path / "file")
    assert list(path.iterdir()) == []


def test_extra_state_that_is_not(tmp_path):
    refused(nn.Sequential(Extra({"step": 3})), tmp_path, r"file: 0\._extra_state .* is a dict, .*make it a buffer")


def test_what_a_state_dict_adds_by_code_of_its_own(tmp_path):
    net = nn.Linear(2, 2)
    net.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(more=torch.ones(1)))
    refused(net, tmp_path, "more .* no parameter and no buffer")


def test_dtypes_and_layouts_that_the_format_lacks(tmp_path):
    refused(Holder(torch.zeros(2, dtype=torch.complex128)), tmp_path, "value is torch.complex128.* convert it")
    refused(Holder(torch.eye(3).to_sparse()), tmp_path, "value is torch.sparse_coo")


def test_tensors_without_values(tmp_path):
    refused(nn.LazyLinear(3), tmp_path, "weight has no shape yet; run the model once")
    refused(nn.Linear(2, 2, device="meta"), tmp_path, "weight is on the meta device")


def test_a_model_on_the_meta_device_cannot_be_loaded_into(tmp_path):
    save(nn.Linear(2, 2), tmp_path / "file")
    with pytest.raises(FileError, match=r"weight of the model is on the meta device; call model\.to_empty"):
        load(tmp_path / "file", nn.Linear(2, 2, device="meta"))


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("order", ["mask", "mask, cut", "cut, mask"])
def test_masks_are_loaded_into_a_model_without_any(tmp_path, order):
    net, x = _plain(), torch.randn(3, 4)
    for step in order.split(", "):
        if step == "cut":
            sec.apply(net, sec.plan(sec.trace(net, x), sec.Ratio(0.5)))
        else:
            sec.prune.l1_unstructured(net[0], "weight", amount=0.5)
    sec.save(net, tmp_path / "a.safetensors")
    loaded = sec.load(tmp_path / "a.safetensors", _plain())
    assert loaded.state_dict().keys() == net.state_dict().keys()
    assert torch.equal(loaded(x), net(x))
    loaded[0].weight_orig.data.fill_(1.0)
    assert torch.equal(loaded[0](x), nn.functional.linear(x, net[0].weight_mask, net[0].bias))  # still a mask


@pytest.mark.parametrize("cut", [False, True])
def test_masks_are_not_left_in_a_model_that_the_file_does_not_fit(tmp_path, cut):
    net = _plain()
    if cut:
        sec.apply(net, sec.plan(sec.trace(net, torch.randn(3, 4)), sec.Ratio(0.5)))
    sec.prune.l1_unstructured(net[0], "weight", amount=0.5)
    sec.save(net, tmp_path / "a.safetensors")
    other = _plain().double()
    with pytest.raises(sec.FileError, match=r"torch\.float32 in the file"):
        sec.load(tmp_path / "a.safetensors", other)
    assert list(other.state_dict()) == list(_plain().state_dict())
    assert all(map(torch.equal, other.parameters(), _plain().double().parameters()))
    assert not other[0]._forward_pre_hooks
    assert isinstance(other[0].weight, nn.Parameter)
