"""Tensors that are mostly zeros: small in the file, the same bits afterwards; files made to attack are refused."""

import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

import secateur as sec
from secateur import prune
from secateur.errors import FileError
from secateur.io.packed import packed
from secateur.sparse import Pattern


def _sparse_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4))
    sec.sparsify(net, [torch.randn(64, 64)], sec.Unstructured(0.5), method=sec.Magnitude())
    return net


def _fresh() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4))


PATTERNS = (sec.Unstructured(0.5), sec.NM(2, 4), sec.NM(4, 8), sec.Block(4, 1))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_zeros_take_at_most_0_55_of_the_file(dtype: torch.dtype, pattern: Pattern, tmp_path: Path) -> None:
    net = _fresh().to(dtype)
    sec.save(net, tmp_path / "dense.safetensors")
    sec.sparsify(net, [torch.randn(64, 64, dtype=dtype)], pattern, method=sec.Magnitude())
    sec.save(net, tmp_path / "sparse.safetensors")
    dense, sparse = ((tmp_path / f"{name}.safetensors").stat().st_size for name in ("dense", "sparse"))
    assert sparse <= 0.55 * dense  # with the header, the biases and the head
    loaded = sec.load(tmp_path / "sparse.safetensors", _fresh().to(dtype))
    for a, b in zip(net.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_zeros_that_masks_left_are_as_small(tmp_path: Path) -> None:
    """A mask times a weight below zero is a negative zero, which is other bits; `remove` leaves none."""
    net = _fresh()
    for layer in (net[0], net[2]):
        prune.remove(prune.l1_unstructured(layer, "weight", amount=0.5), "weight")
        assert not layer.weight[layer.weight == 0].signbit().any()
    sec.save(net, tmp_path / "net.safetensors")
    assert (tmp_path / "net.safetensors").stat().st_size <= 0.55 * sum(p.numel() * 4 for p in net.parameters())


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


def deflated(size: int, more: bytes = b"", byte: int = 0) -> Tensor:
    """So many bytes of one kind, deflated as `save` does."""
    stream = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    made = stream.compress(bytes([byte]) * size) + stream.flush() + more
    return torch.frombuffer(bytearray(made), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"0__weight:values": None}, "missing or there twice"),
        ({"0__weight": torch.zeros(256, 64)}, "missing or there twice"),
        ({"0__weight:values": torch.zeros(7, dtype=torch.uint8)}, "its values are not the 8192 of its mask"),
        ({"0__weight:values": deflated(4 * 8192 - 4)}, "its values are not the 8192"),
        ({"0__weight:values": deflated(4 * 8192 + 4)}, "its values are not the 8192"),
        ({"0__weight:values": deflated(4 * 8192, b"more")}, "its values are not the 8192"),
        ({"0__weight:values": deflated(4 * 8192)[:-1]}, "its values are not the 8192"),
        ({"0__weight:values": torch.zeros(7)}, "not those of one tensor"),
        ({"0__weight:mask": deflated(2048, byte=255)}, "its values are not the 16384 of its mask"),
        ({"0__weight:mask": deflated(2047)}, "its mask is not that of its entries"),
        ({"0__weight:mask": deflated(2**24)}, "its mask is not that of its entries"),  # far more than is wanted
        ({"0__weight:mask": torch.zeros(300, dtype=torch.uint8)}, "its mask is not that of its entries"),
        ({"0__weight:mask": torch.zeros(3, dtype=torch.uint8)}, "not those of one tensor"),
        ({"0__weight:mask": torch.zeros(2048, dtype=torch.int64)}, "not those of one tensor"),
        ({"0__weight:like": torch.zeros(256, 64)}, "not those of one tensor"),
        ({"0__weight:like": torch.zeros(())}, "not those of one tensor"),
        ({"0__weight:like": torch.zeros(0, 2**30, 2**30)}, "not those of one tensor"),
        ({"0__weight:like": torch.zeros(0, *[1] * 63, 64, 256)}, "not those of one tensor"),
        ({"0__weight:like": torch.zeros(0, 64, 256)}, r"\[64, 256\] in the file"),
        ({"0__weight:like": torch.zeros(0, 256, 64, dtype=torch.float64)}, "its values are not the 8192"),
        (
            {
                "0__weight:like": torch.zeros(0, 2**16, 2**8),
                "0__weight:mask": torch.zeros(2**18, dtype=torch.uint8),
                "0__weight:values": torch.zeros(0, dtype=torch.uint8),
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
