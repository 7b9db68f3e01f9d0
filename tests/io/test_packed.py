"""Tensors that are mostly zeros: small in the file, the same bits afterwards; files made to attack are refused."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

import secateur as sec
from secateur.errors import FileError
from secateur.io.packed import packed


def _sparse_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4))
    sec.sparsify(net, [torch.randn(64, 64)], sec.Unstructured(0.5), method=sec.Magnitude())
    return net


def _fresh() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4))


def test_half_zeros_take_little_more_than_half(tmp_path: Path) -> None:
    net = _sparse_net()
    sec.save(net, tmp_path / "sparse.safetensors")
    dense = sum(p.numel() * 4 for p in net.parameters())
    assert (tmp_path / "sparse.safetensors").stat().st_size < 0.57 * dense  # with the header and the dense biases
    loaded = sec.load(tmp_path / "sparse.safetensors", _fresh())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8])
def test_every_bit_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.zeros(33, 77, dtype=dtype))

    net, fresh = Net(), Net()
    net.weight[3, 5:9] = torch.tensor([1, 2, 3, 4])
    if dtype.is_floating_point:
        net.weight[0, 0], net.weight[0, 1], net.weight[1, 0] = -0.0, float("nan"), float("-inf")
    sec.save(net, tmp_path / "net.safetensors")
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        assert "weight:mask" in file.keys()  # noqa: SIM118
    sec.load(tmp_path / "net.safetensors", fresh)
    assert torch.equal(fresh.weight.view(torch.uint8), net.weight.view(torch.uint8))


def test_dense_small_and_odd_tensors_stay_as_they_are() -> None:
    tensors = {"dense": torch.randn(64, 64), "small": torch.zeros(8), "bool": torch.zeros(64, 64, dtype=torch.bool)}
    assert packed(tensors).keys() == tensors.keys()


def test_a_cut_and_sparse_model_comes_back(tmp_path: Path) -> None:
    net = _fresh()
    sec.apply(net, sec.plan(sec.trace(net, torch.zeros(1, 64)), sec.Ratio(0.5)))
    sec.sparsify(net, [torch.randn(64, 64)], sec.NM(2, 4), method=sec.Magnitude())
    sec.save(net, tmp_path / "net.safetensors")
    loaded = sec.load(tmp_path / "net.safetensors", _fresh())
    assert torch.equal(loaded(torch.ones(1, 64)), net(torch.ones(1, 64)))


def _rewritten(path: Path, **changes: Tensor | None) -> None:
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    tensors |= {name.replace("__", "."): part for name, part in changes.items() if part is not None}
    for name in (name.replace("__", ".") for name, part in changes.items() if part is None):
        del tensors[name]
    safetensors.torch.save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"0__weight:values": None}, "missing or there twice"),
        ({"0__weight": torch.zeros(256, 64)}, "missing or there twice"),
        ({"0__weight:values": torch.zeros(7)}, "does not fit its 7 values"),
        ({"0__weight:mask": torch.full((2048,), 255, dtype=torch.uint8)}, "does not fit"),
        ({"0__weight:mask": torch.zeros(3, dtype=torch.uint8)}, "not those of one tensor"),
        ({"0__weight:mask": torch.zeros(2048, dtype=torch.int64)}, "not those of one tensor"),
        ({"0__weight:shape": torch.tensor([-256, -64])}, "not those of one tensor"),
        ({"0__weight:shape": torch.tensor([2**40, 2**40])}, "not those of one tensor"),
        ({"0__weight:shape": torch.ones(65, dtype=torch.int64)}, "not those of one tensor"),
        ({"0__weight:shape": torch.tensor([256.0, 64.0])}, "not those of one tensor"),
        ({"0__weight:shape": torch.tensor([64, 256])}, r"\[64, 256\] in the file"),
        (
            {
                "0__weight:shape": torch.tensor([2**16, 2**8]),
                "0__weight:mask": torch.zeros(2**21, dtype=torch.uint8),
                "0__weight:values": torch.zeros(0),
            },
            r"\[65536, 256\] in the file",
        ),
    ],
)
def test_hostile_parts_are_refused(changes: dict[str, Tensor | None], says: str, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    sec.save(_sparse_net(), path)
    _rewritten(path, **changes)
    net = _fresh()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(FileError, match=says):
        sec.load(path, net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_name_that_would_be_mistaken_is_refused(tmp_path: Path) -> None:
    net = nn.Module()
    net.register_parameter("a:mask", nn.Parameter(torch.zeros(2)))
    with pytest.raises(FileError, match="another name"):
        sec.save(net, tmp_path / "net.safetensors")
