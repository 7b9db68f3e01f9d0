"""A checkpoint to which each rank adds the part that it has: files as `torch.distributed.checkpoint` writes them.

These are in safetensors, each with the parts of one rank and where in the whole each belongs; beside them,
`secateur-model.json` says how to rebuild the model. That module's own format, whose `.metadata` is a pickle, is neither
written nor read. What is written with it can be read by it, through its `HuggingFaceStorageReader`; it is read here
without it: each rank, or a single process, takes what it needs from the files, and they are not trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from secateur import compat
from secateur.arguments import shown
from secateur.distributed import meet, ranks
from secateur.errors import FileError
from secateur.io.atomic import new_folder
from secateur.io.file import ENTRY, Header
from secateur.io.shards import contents
from secateur.planning.json import parse

HEADER = "secateur-model.json"
_OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # in the metadata of a file, as torch has it
_REMEDY = "it is damaged or was not written by secateur.save"


def write_parts(target: Path, tensors: Mapping[str, Tensor], header: Header) -> None:
    """Have each rank write what it has of some tensors into a new folder, which is there when all have."""
    first = ranks() == 1 or dist.get_rank() == 0
    with new_folder(target) if first else nullcontext() as new:
        place = Path(meet("save: folder", "" if new is None else str(new))[0])
        why = compat.write_parts(dict(tensors), str(place), alone=ranks() == 1)
        if why:
            raise FileError(f"it could not be written: {why}; is the disk full?")
        if new is not None:
            (new / HEADER).write_text(header.metadata()[ENTRY], "utf-8")
            _check_written(Parts(new), tensors)
    meet("save: done")


def _check_written(found: Parts, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name not in found.keys() or found.shape(name) != tuple(tensor.shape):  # noqa: SIM118
            raise FileError(
                f"{name} is not there as a whole after all ranks have written; is it a folder that all ranks share?"
            )


class _Part(NamedTuple):
    """A part of a tensor: its file, where in the whole it begins, and its shape."""

    file: Path
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Parts:
    """A folder of such files. Tensors are whole, or as much of them as is asked for; nothing is read before that."""

    def __init__(self, folder: Path) -> None:
        self.header = Header.read({ENTRY: (folder / HEADER).read_text("utf-8")})
        found: dict[str, list[_Part]] = {}
        kinds: dict[str, str] = {}
        for file in sorted(folder.glob("*.safetensors")):
            forms, metadata = contents(file)
            starts = _starts(metadata)
            for name, form in forms.items():
                found.setdefault(name, []).append(_Part(file, starts(name, len(form.shape)), form.shape))
                if kinds.setdefault(name, form.dtype) != form.dtype:
                    raise FileError(f"parts of {shown(name)} have other dtypes than others; {_REMEDY}")
        self._parts = {name: _fitting(name, parts) for name, parts in found.items()}
        self._opened: dict[Path, Any] = {}

    def keys(self) -> Sequence[str]:
        """The names of all tensors."""
        return sorted(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole tensor, which is not read."""
        return tuple(max(ends) for ends in zip(*map(_end, self._parts[name]), strict=True))

    def get_tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        shape = self.shape(name)
        return self.get_part(name, (0,) * len(shape), shape)

    def get_part(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """What is in a box of a tensor."""
        parts = self._parts[name]
        if len(parts) == 1 and (start, shape) == parts[0][1:]:
            return self._file(parts[0].file).get_tensor(name)
        kind = self._file(parts[0].file).get_slice(name)[:0].dtype
        made = torch.empty(shape, dtype=kind)
        for part in parts:
            low = [max(a, b) for a, b in zip(start, part.start, strict=True)]
            high = [min(a + n, b) for a, n, b in zip(start, shape, _end(part), strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                there, here = (
                    tuple(slice(a - zero, b - zero) for a, b, zero in zip(low, high, origin, strict=True))
                    for origin in (part.start, start)
                )
                made[here] = self._file(part.file).get_slice(name)[there]
        return made

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        return self._opened[path]


def _end(part: _Part) -> tuple[int, ...]:
    return tuple(at + size for at, size in zip(part.start, part.shape, strict=True))


def _starts(metadata: Mapping[str, str] | None) -> Callable[[str, int], tuple[int, ...]]:
    """Where the tensors of a file begin in the whole, by the file's metadata."""
    entry, key = _OFFSETS
    told: Any = {}
    if metadata and entry in metadata:
        try:
            told = parse(metadata[entry])
        except ValueError as error:
            raise FileError(f"its metadata cannot be read: {error}; {_REMEDY}") from None

    def start(name: str, dims: int) -> tuple[int, ...]:
        found = told.get(name, {}) if isinstance(told, dict) else None
        at = found.get(key, [0] * dims) if isinstance(found, dict) else None
        if not isinstance(at, list) or len(at) != dims or any(type(n) is not int or not 0 <= n < 2**62 for n in at):
            raise FileError(f"it does not say where the parts of {shown(name)} belong; {_REMEDY}")
        return tuple(at)

    return start


def _fitting(name: str, parts: list[_Part]) -> list[_Part]:
    """Parts that make up a whole: a grid without gaps, in which nothing is there twice."""
    dims = {len(part.shape) for part in parts}
    fits = len(dims) == 1
    for dim in range(max(dims)) if fits else ():
        starts = sorted({part.start[dim] for part in parts})
        ends = dict(zip(starts, [*starts[1:], max(_end(part)[dim] for part in parts)], strict=True))
        fits = fits and starts[0] == 0 and all(_end(part)[dim] == ends[part.start[dim]] for part in parts)
    cells = [len({part.start[dim] for part in parts}) for dim in range(max(dims))]
    if not fits or math.prod(cells) != len(parts) or len({part.start for part in parts}) != len(parts):
        raise FileError(f"the parts of {shown(name)} do not make up one tensor; is a file missing? {_REMEDY}")
    return parts


__all__ = ["HEADER", "Parts", "write_parts"]
