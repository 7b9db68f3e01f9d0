"""A folder with a checkpoint in safetensors, as Transformers writes it: one file, or several and an index."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from secateur.arguments import shown
from secateur.errors import FileError
from secateur.planning.json import parse

_ENDING, _INDEX = ".safetensors", ".safetensors.index.json"
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # moved as they are, whatever they mean


class Form(NamedTuple):
    """Of a tensor in a file: its dtype as the format calls it, its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shards:
    """The files of a checkpoint and the tensors in each, of which nothing is read yet."""

    folder: Path
    forms: Mapping[str, Mapping[str, Form]]  # file: {tensor: form}
    metadata: Mapping[str, Mapping[str, str] | None]  # of each file
    index: str | None  # the name of the file that says which tensor is where

    @staticmethod
    def of(folder: Path) -> Shards:
        """What is in a folder; refused where its index says something else."""
        if not folder.is_dir():
            raise FileError("there is no such folder; give one with a checkpoint in safetensors")
        indices = sorted(file.name for file in folder.glob(f"*{_INDEX}"))
        files = sorted(file.name for file in folder.glob(f"*{_ENDING}"))
        if len(indices) > 1 or (not indices and len(files) != 1):
            found = f"{len(files)} files in safetensors and {len(indices)} indices"
            raise FileError(f"it has {found}; a checkpoint is one file, or several and one index ({_INDEX[1:]})")
        index = indices[0] if indices else None
        listed = None if index is None else _weight_map(folder / index)
        files = files if listed is None else sorted(set(listed.values()))
        forms, metadata = {}, {}
        for file in files:
            forms[file], metadata[file] = contents(folder / file)
        held = {name: file for file in files for name in forms[file]}
        if listed is not None and listed != held:
            wrong = min(name for name in {*listed, *held} if listed.get(name) != held.get(name))
            raise FileError(f"its index and its files do not agree on where {shown(wrong)} is; get it anew")
        if len(held) < sum(map(len, forms.values())):
            raise FileError("two of its files hold a tensor of the same name; get it anew")
        return Shards(folder, forms, metadata, index)

    def tensors(self, file: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one file, mapped, one at a time, as whole numbers of their bytes."""
        with safe_open(self.folder / file, framework="pt") as opened:
            for name in self.forms[file]:
                tensor = opened.get_tensor(name)
                yield name, tensor.view(_RAW[tensor.element_size()])


def contents(path: Path) -> tuple[dict[str, Form], dict[str, str] | None]:
    """The tensors of a safetensors file and its metadata."""
    with safe_open(path, framework="pt") as opened:
        parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        forms = {name: Form(part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
        return forms, opened.metadata()


def starts(path: Path) -> dict[str, int]:
    """Where in a safetensors file, which was opened before and is in order, each tensor begins."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {name: 8 + size + told["data_offsets"][0] for name, told in header.items() if name != "__metadata__"}


def _weight_map(path: Path) -> dict[str, str]:
    """{tensor: file} of an index, whose files are in the same folder."""
    data = read_json(path)
    listed = data.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise FileError(f"{path.name} has no weight_map; get it anew")
    for file in listed.values():
        if os.path.basename(file) != file or not file.endswith(_ENDING):
            raise FileError(f"{path.name} names {shown(file)}, which is no file of this folder")
        if not (path.parent / file).is_file():
            raise FileError(f"{path.name} names {shown(file)}, which is not there; get it anew")
    return listed


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file of unknown origin."""
    try:
        data = parse(path.read_bytes())
    except ValueError as error:
        raise FileError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise FileError(f"{path.name} should hold an object, not {type(data).__name__}")
    return data


def write_shard(
    path: Path, forms: Mapping[str, Form], metadata: Mapping[str, str] | None, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a safetensors file tensor by tensor, in any order, of which one is held at a time; read back its header."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begins, end = {}, 0
    for name in sorted(forms, key=lambda name: (-_itemsize(forms[name].dtype), name)):  # so that each lies aligned
        begins[name], end = end, end + nbytes(forms[name])
        dtype, shape = forms[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name, tensor in tensors:
            file.seek(8 + len(text) + begins[name])
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next is made
    if contents(path) != (dict(forms), metadata) or path.stat().st_size != 8 + len(text) + end:
        raise FileError(f"{path.name} did not come back as it was written; try again")


def nbytes(form: Form) -> int:
    """What a tensor takes in a file."""
    return _itemsize(form.dtype) * math.prod(form.shape)


def _itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype, by its name in the format: F32, BF16, F8_E4M3, BOOL."""
    digits = dtype.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ").partition("_")[0]
    bits = 8 if dtype == "BOOL" else int(digits) if digits.isdigit() else 0
    if bits not in (8, 16, 32, 64):
        raise FileError(f"tensors of {shown(dtype)} cannot be cut in a file; load the model")
    return bits // 8


__all__ = ["Form", "Shards", "nbytes", "read_json", "starts", "write_shard"]
