"""A folder to which each rank adds its part, on one process; and files in it that are not what they say."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import secateur as sec
from secateur.io.parts import HEADER, Parts

INFO = "DCP_SHARDING_INFO"


class Net(nn.Module):
    """With a buffer that no state dict has, and extra sizes to tell dimensions apart."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 3)
        self.register_buffer("offset", torch.rand(12), persistent=False)
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x) + self.offset))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = Net()
    sec.apply(model, sec.plan(sec.trace(model, torch.zeros(1, 4)), sec.Ratio(0.5)))
    sec.save(model, tmp_path / "small", sharded=True)
    sec.save(model, tmp_path / "small.safetensors")
    return tmp_path / "small"


def file_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def rewritten(folder: Path, tensors: dict[str, Any], starts: Any, name: str | None = None) -> None:
    """Another file in the place of the one that is there, or beside it."""
    path = file_of(folder) if name is None else folder / name
    metadata = {INFO: json.dumps(starts) if not isinstance(starts, str) else starts}
    save_file(tensors, path, metadata=metadata)


def held(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(file_of(folder), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()[INFO])  # noqa: SIM118


def split(folder: Path, name: str, at: int) -> None:
    """One tensor in two files."""
    tensors, starts = held(folder)
    whole = tensors[name]
    rewritten(folder, {**tensors, name: whole[:at].clone()}, starts)
    rewritten(folder, {name: whole[at:].clone()}, {name: {"saved_offsets": [at, 0]}}, "other.safetensors")


def refused(folder: Path, match: str) -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(sec.FileError, match=match):
        sec.load(folder, model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_one_process(folder: Path) -> None:
    assert sorted(file.name for file in folder.iterdir()) == [HEADER, file_of(folder).name]
    one, other = sec.load(folder, Net()), sec.load(folder.with_suffix(".safetensors"), Net())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert Parts(folder).header.tables == ("offset",)


def test_parts_are_joined(folder: Path) -> None:
    before = held(folder)[0]["down.weight"]
    split(folder, "down.weight", 2)
    parts = Parts(folder)
    assert torch.equal(parts.get_tensor("down.weight"), before)
    assert torch.equal(parts.get_part("down.weight", (1, 2), (2, 3)), before[1:3, 2:5])
    assert torch.equal(parts.get_part("down.weight", (2, 0), (1, 6)), before[2:])
    assert parts.get_part("down.weight", (3, 0), (0, 6)).shape == (0, 6)
    sec.load(folder, Net())


def test_a_missing_part_is_noticed(folder: Path) -> None:
    split(folder, "down.weight", 2)
    (folder / "other.safetensors").unlink()
    refused(folder, "down.weight is .* in the file")


@pytest.mark.parametrize(
    ("starts", "match"),
    [
        ("[" * 100000, "cannot be read"),
        ([], "does not say where"),
        ({"down.weight": {"saved_offsets": [-1, 0]}}, "does not say where"),
        ({"down.weight": {"saved_offsets": [0]}}, "does not say where"),
        ({"down.weight": {"saved_offsets": [True, 0]}}, "does not say where"),
        ({"down.weight": {"saved_offsets": [2**62, 0]}}, "does not say where"),
        ({"down.weight": {"saved_offsets": [5, 0]}}, "do not make up one tensor"),
        ({"down.weight": 3}, "does not say where"),
    ],
)
def test_places_that_cannot_be(folder: Path, starts: Any, match: str) -> None:
    rewritten(folder, held(folder)[0], starts)
    refused(folder, match)


def test_parts_that_do_not_fit(folder: Path) -> None:
    tensors = held(folder)[0]
    weight = tensors["down.weight"]
    for shape, start, match in (
        ((2, 6), [0, 0], "do not make up one"),  # the same place twice
        ((1, 6), [2, 0], "do not make up one"),  # one over the other
        ((1, 6), [4, 0], "do not make up one"),  # a gap
        ((1, 3), [3, 0], "do not make up one"),  # too short
        ((1, 6), [3, 0], "is \\[4, 6\\] in the file"),  # too much
    ):
        other = {"down.weight": torch.zeros(shape)}
        rewritten(folder, other, {"down.weight": {"saved_offsets": start}}, "other.safetensors")
        refused(folder, match)
    more = {"down.weight": weight.double()[:1]}
    rewritten(folder, more, {"down.weight": {"saved_offsets": [3, 0]}}, "other.safetensors")
    refused(folder, "other dtypes")
    (folder / "other.safetensors").unlink()
    sec.load(folder, Net())


def test_a_header_that_is_none(folder: Path) -> None:
    for text, match in (("{}", "not that of a model"), ("[", "cannot be read"), ("", "cannot be read")):
        (folder / HEADER).write_text(text)
        refused(folder, match)


def test_pickles_are_not_opened(folder: Path) -> None:
    """What torch.distributed.checkpoint writes by itself is not taken for a checkpoint, and no file is unpickled."""

    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (folder / "opened",)

    for name in (".metadata", "__0_0.distcp"):
        (folder / name).write_bytes(pickle.dumps(Trap()))
    sec.load(folder, Net())
    (folder / HEADER).unlink()
    refused(folder, "holds no cut model")
    assert not (folder / "opened").exists()


def test_a_folder_that_is_there_stays(folder: Path) -> None:
    before = sorted(file.name for file in folder.iterdir())
    with pytest.raises(sec.FileError, match="there is something already"):
        sec.save(Net(), folder, sharded=True)
    assert sorted(file.name for file in folder.iterdir()) == before
    with pytest.raises(sec.FileError, match="make it first"):
        sec.save(Net(), folder / "no" / "such", sharded=True)
    with pytest.raises(sec.FileError, match="shard= is a function"):
        sec.load(folder, shard=lambda model: None)
