"""Files that are damaged, or are something else altogether."""

import io
import json
import os
import pickle
import struct
import zipfile
from dataclasses import replace

import pytest
import torch
from crafted import IDS, Net, Parts, cut_net, genuine, refuses, valid

from secateur import FileError
from secateur.io import load, save


class Bomb:
    """Unpickled, it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_the_valid_file_loads(tmp_path):
    """What the other tests change is right before they change it."""
    net, path = valid(tmp_path / "file")
    fresh = load(path, Net().eval())
    with torch.no_grad():
        assert torch.equal(fresh(IDS), net(IDS))
    assert fresh.width == 8
    again = Parts.of(path).to(tmp_path / "again")
    assert load(again, Net()).width == 8
    assert genuine().said["plan"]["attributes"]


def test_cut_short_anywhere(tmp_path):
    _, path = valid(tmp_path / "file")
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    places = {0, 1, 7, 8, 9, length // 2, length, length + 7, length + 8, length + 9, len(whole) - 1}
    for end in sorted(places | set(range(0, len(whole), len(whole) // 17))):
        path.write_bytes(whole[:end])
        refuses(path, "damaged or was not written by")


def test_longer_than_it_says(tmp_path):
    _, path = valid(tmp_path / "file")
    path.write_bytes(path.read_bytes() + b"more")
    refuses(path, "damaged or was not written by")


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 99_999_999, 100_000_001, 0, 1])
def test_a_header_that_claims_another_length(tmp_path, length):
    _, path = valid(tmp_path / "file")
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    refuses(path, "header")


def test_other_formats(tmp_path):
    path, trap = tmp_path / "file", tmp_path / "trap"
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("data.pkl", pickle.dumps(Bomb(trap)))
    checkpoint = io.BytesIO()
    torch.save(cut_net().state_dict(), checkpoint)
    for data in (
        b"",
        b"\x93NUMPY" + b"\0" * 100,
        b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
        b"#!/bin/sh\necho\n" * 10,
        b"\0" * 4096,
        b"\xff" * 4096,
        pickle.dumps(Bomb(trap)),
        archive.getvalue(),
        checkpoint.getvalue(),
    ):
        path.write_bytes(data)
        refuses(path, "damaged or was not written by")
    assert not trap.exists()


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refuses(tmp_path, "this folder holds no cut model")
    refuses(tmp_path / "pipe", "a folder or a device, not a file")
    refuses("/dev/zero", "a folder or a device, not a file")
    refuses(tmp_path / "missing", "No such file")
    for path in (None, 3, b"bytes", "nul\0"):
        with pytest.raises(FileError):
            load(path, Net())


def test_a_safetensors_file_of_somebody_elses(tmp_path):
    from safetensors.torch import save_file

    tensors = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    save_file(tensors, tmp_path / "file")
    refuses(tmp_path / "file", "no plan")
    save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    refuses(tmp_path / "file", "no plan")


def tensor(parts, name, **fields):
    return replace(parts, tensors={**parts.tensors, name: {**parts.tensors[name], **fields}})


def test_tensors_that_claim_impossible_sizes(tmp_path):
    path = tmp_path / "file"
    for fields in (
        {"shape": [2**62, 2**62]},
        {"shape": [2**40]},
        {"shape": [-1]},
        {"shape": [2**64]},
        {"shape": [1.5]},
        {"data_offsets": [0, 2**63]},
        {"data_offsets": [2**64 - 4, 2**64 - 1]},
        {"data_offsets": [8, 4]},
        {"dtype": "F99"},
        {"dtype": "O"},
    ):
        refuses(tensor(genuine(), "up.bias", **fields).to(path), "damaged or was not written by")


def test_tensors_of_other_shapes_and_dtypes(tmp_path):
    path = tmp_path / "file"
    assert genuine().tensors["up.bias"]["shape"] == [8]
    refuses(
        tensor(genuine(), "up.bias", shape=[4, 2]).to(path), r"up\.bias is \[4, 2\] in the file, \[8\] in the model"
    )
    refuses(tensor(genuine(), "up.bias", shape=[8] + [1] * 3000).to(path), r"up\.bias is \[8, 1, ")
    refuses(tensor(genuine(), "up.bias", shape=[16], dtype="BF16").to(path), r"up\.bias is \[16\]")
    words = r"up\.bias is torch.int32 in the file, torch.float32 in the model; build"
    refuses(tensor(genuine(), "up.bias", dtype="I32").to(path), words)


def test_missing_and_extra_tensors(tmp_path):
    path = tmp_path / "file"
    renamed = {("more" if name == "up.bias" else name): value for name, value in genuine().tensors.items()}
    refuses(replace(genuine(), tensors=renamed).to(path), r"it lacks 'up\.bias' \(1 in all\)")
    extra = {**genuine().tensors, "evil\x1b[31m": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    refuses(replace(genuine(), tensors=extra).to(path), r"the model lacks 'evil\\x1b\[31m'")
    refuses(replace(genuine(), tensors={}, data=b"").to(path), "it ties 'embed.weight', which it does not hold")


def test_precision(tmp_path):
    save(Net().bfloat16(), tmp_path / "file")
    refuses(tmp_path / "file", r"torch.bfloat16 in the file, torch.float32 .* call model\.to\(torch\.bfloat16\)")


def test_the_same_entry_twice(tmp_path):
    """The format's reader takes the last one: it must then be right by itself."""
    path = genuine().to(tmp_path / "file")
    header = json.dumps({"__metadata__": {"secateur": json.dumps(genuine().said)}, **genuine().tensors})
    first = '"up.bias": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}'
    header = "{" + first + ", " + header[1:]
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + genuine().data)
    assert load(path, Net()).width == 8
