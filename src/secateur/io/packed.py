"""Tensors that are mostly zeros, as a bit for each entry and the values that are not zero.

In a file, such a tensor `name` is three: `name:mask`, the bits, eight in a byte, the first the highest, in row-major
order; `name:values`; and `name:shape`. Zero means that all bits of an entry are zero, so that what is read back is bit
for bit what was written, negative zeros and NaNs included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.errors import FileError

_MASK, _VALUES, _SHAPE = _ENDS = ":mask", ":values", ":shape"
_LEAST = 1024  # entries below which a tensor stays as it is
_WORTH = 0.9  # of its size, what a packed tensor takes at most
_DEEPEST = 64  # dimensions
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DAMAGED = "it is damaged or was not written by secateur.save"


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What goes into a file: the tensors, those that are mostly zeros as their parts.

    >>> weight = torch.zeros(64, 64)
    >>> weight[0, :3] = torch.tensor([1.0, 2.0, 3.0])
    >>> {name: tuple(part.shape) for name, part in packed({"weight": weight}).items()}
    {'weight:mask': (512,), 'weight:values': (3,), 'weight:shape': (2,)}
    """
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_ENDS):
            raise FileError(f"{name} ends as the parts of packed tensors do; give it another name")
        parts = _parts(tensor)
        made |= {name: tensor} if parts is None else {f"{name}{end}": parts[end] for end in _ENDS}
    return made


def _parts(tensor: Tensor) -> dict[str, Tensor] | None:
    """A tensor's bits, values and shape; None where these would take about as much as itself."""
    integers = _INTEGERS.get(tensor.dtype.itemsize)
    if integers is None or tensor.dtype is torch.bool or tensor.numel() < _LEAST:
        return None
    flat = tensor.reshape(-1)
    there = flat.view(integers) != 0
    size = int(there.sum()) * tensor.dtype.itemsize + tensor.numel() / 8
    if size > _WORTH * tensor.numel() * tensor.dtype.itemsize:
        return None
    bits = torch.from_numpy(np.packbits(there.numpy()))
    return {_MASK: bits, _VALUES: flat[there], _SHAPE: torch.tensor(tensor.shape, dtype=torch.int64)}


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
        return str(self._file.get_slice(name + _VALUES if name in self._shapes else name).get_dtype())

    def get_tensor(self, name: str) -> Tensor:
        """A tensor, unpacked."""
        if name not in self._shapes:
            found: Tensor = self._file.get_tensor(name)
            return found
        shape, bits, values = self._shapes[name], *(self._file.get_tensor(name + end) for end in (_MASK, _VALUES))
        count = math.prod(shape)
        there = torch.from_numpy(np.unpackbits(bits.numpy())).bool()
        if bool(there[count:].any()) or int(there.sum()) != len(values):
            raise FileError(f"{name!r:.80} is packed, and its mask does not fit its {len(values)} values; {_DAMAGED}")
        made = torch.zeros(count, dtype=values.dtype)
        made[there[:count]] = values
        return made.view(shape)

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a packed tensor, of which its other parts are seen to be."""
        slices = {end: self._file.get_slice(name + end) for end in _ENDS}
        kinds = {end: (part.get_dtype(), len(part.get_shape())) for end, part in slices.items()}
        fits = kinds[_MASK] == ("U8", 1) and kinds[_VALUES][1] == 1 and kinds[_SHAPE] == ("I64", 1)
        if fits and slices[_SHAPE].get_shape()[0] <= _DEEPEST:
            shape = tuple(int(n) for n in self._file.get_tensor(name + _SHAPE))
            bits = slices[_MASK].get_shape()[0]
            if min(shape, default=0) >= 0 and -(-math.prod(shape) // 8) == bits:
                return shape
        raise FileError(f"{name!r:.80} is packed, and its parts are not those of one tensor; {_DAMAGED}")


def _stem(name: str) -> str | None:
    """The name of the tensor that a stored one is a part of."""
    return next((name.removesuffix(end) for end in _ENDS if name.endswith(end)), None)
