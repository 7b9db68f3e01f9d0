"""Tensors that are mostly zeros, as a bit for each entry and the values that are not zero.

In a file, such a tensor `name` is three: `name:like`, which has its type, its shape behind a 0, and no elements;
`name:mask`, the bits, eight in a byte, the first the highest, in row-major order; and `name:values`, the highest byte
of every value, then the next one of every value, and so on. Mask and values are deflated (RFC 1951) by how often each
byte occurs: exponents are few, and so are the bytes of a pattern such as 2:4. Zero means that all bits of an entry are
zero, so that what is read back is bit for bit what was written, negative zeros and NaNs included.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.errors import FileError

_LIKE, _MASK, _VALUES = _ENDS = ":like", ":mask", ":values"
_LEAST = 1024  # entries below which a tensor stays as it is
_WORTH = 0.9  # of its size, what bits and values take at most
_DEEPEST = 64  # dimensions
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RAW = -15  # to zlib: a stream without header and checksum
_DAMAGED = "it is damaged or was not written by secateur.save"


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What goes into a file: the tensors, those that are mostly zeros as their parts.

    >>> weight = torch.zeros(64, 64)
    >>> weight[0, :3] = torch.tensor([1.0, 2.0, 3.0])
    >>> parts = packed({"weight": weight})
    >>> list(parts), sum(part.numel() * part.itemsize for part in parts.values()) < 0.01 * 4 * weight.numel()
    (['weight:like', 'weight:mask', 'weight:values'], True)
    """
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_ENDS):
            raise FileError(f"{name} ends as the parts of packed tensors do; give it another name")
        parts = _parts(tensor)
        made |= {name: tensor} if parts is None else {f"{name}{end}": parts[end] for end in _ENDS}
    return made


def _parts(tensor: Tensor) -> dict[str, Tensor] | None:
    """A tensor's kind, bits and values; None where these would take about as much as itself."""
    integers = _INTEGERS.get(tensor.dtype.itemsize)
    if integers is None or tensor.dtype is torch.bool or tensor.numel() < _LEAST:
        return None
    flat = tensor.reshape(-1)
    there = flat.view(integers) != 0
    size = int(there.sum()) * tensor.dtype.itemsize + tensor.numel() / 8
    if size > _WORTH * tensor.numel() * tensor.dtype.itemsize:
        return None
    values = flat[there].view(torch.uint8).view(-1, tensor.dtype.itemsize)
    like = torch.empty((0, *tensor.shape), dtype=tensor.dtype)
    return {_LIKE: like, _MASK: _deflated(np.packbits(there.numpy())), _VALUES: _deflated(values.numpy().T[::-1])}


def _deflated(numbers: Any) -> Tensor:
    """Bytes in fewer."""
    stream = zlib.compressobj(1, zlib.DEFLATED, _RAW, 9, zlib.Z_HUFFMAN_ONLY)
    made = stream.compress(np.ascontiguousarray(numbers).data) + stream.flush()
    return torch.frombuffer(bytearray(made), dtype=torch.uint8)


def _inflated(stored: Tensor, size: int) -> Any:
    """So many bytes; None where others are stored. No more than these are made."""
    stream = zlib.decompressobj(_RAW)
    try:
        made = stream.decompress(stored.numpy().data, size + 1)
    except zlib.error:
        return None
    whole = len(made) == size and stream.eof and not stream.unused_data
    return np.frombuffer(made, np.uint8) if whole else None


class Unpacking:
    """A safetensors file whose packed tensors look like any others; anything odd about them is refused."""

    def __init__(self, file: Any) -> None:
        self._file = file
        stored = set(file.keys())
        ends = {name: {end for end in _ENDS if name + end in stored} for name in map(_stem, stored) if name is not None}
        odd = next((name for name, found in ends.items() if len(found) < 3 or name in stored), None)
        if odd is not None:
            raise FileError(f"{odd!r:.80} is packed, and one of its parts is missing or there twice; {_DAMAGED}")
        self._shapes = {name: self._shape(name) for name in ends}
        self._names = sorted(stored - {name + end for name in ends for end in _ENDS} | set(ends))

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return self._names

    def metadata(self) -> Any:
        """What the file says about itself."""
        return self._file.metadata()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, which is not read."""
        return self._shapes[name] if name in self._shapes else tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Of a tensor, as the format calls it."""
        return str(self._file.get_slice(name + _LIKE if name in self._shapes else name).get_dtype())

    def get_tensor(self, name: str) -> Tensor:
        """A tensor, unpacked."""
        if name not in self._shapes:
            found: Tensor = self._file.get_tensor(name)
            return found
        shape, (like, mask, values) = self._shapes[name], (self._file.get_tensor(name + end) for end in _ENDS)
        bits = _inflated(mask, -(-math.prod(shape) // 8))
        there = None if bits is None else torch.from_numpy(np.unpackbits(bits)).bool()
        if there is None or bool(there[math.prod(shape) :].any()):
            raise FileError(f"{name!r:.80} is packed, and its mask is not that of its entries; {_DAMAGED}")
        made = torch.zeros(math.prod(shape), dtype=like.dtype)
        width, count = like.dtype.itemsize, int(there.sum())
        planes = _inflated(values, count * width)
        if planes is None:
            raise FileError(f"{name!r:.80} is packed, and its values are not the {count} of its mask; {_DAMAGED}")
        bytes_of_each = planes.reshape(width, count)[::-1].T.copy()
        made[there[: len(made)]] = torch.from_numpy(bytes_of_each).view(-1).view(like.dtype)
        return made.view(shape)

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a packed tensor, of which its other parts are seen to be; a byte is no less than a bit."""
        slices = {end: self._file.get_slice(name + end) for end in _ENDS}
        kinds = {end: (slices[end].get_dtype(), len(slices[end].get_shape())) for end in (_MASK, _VALUES)}
        nothing, *shape = slices[_LIKE].get_shape() or [1]
        fits = set(kinds.values()) == {("U8", 1)} and nothing == 0 and len(shape) <= _DEEPEST
        if fits and -(-math.prod(shape) // 8) <= 8 * slices[_MASK].get_shape()[0]:
            return tuple(shape)
        raise FileError(f"{name!r:.80} is packed, and its parts are not those of one tensor; {_DAMAGED}")


def _stem(name: str) -> str | None:
    """The name of the tensor that a stored one is a part of."""
    return next((name.removesuffix(end) for end in _ENDS if name.endswith(end)), None)
