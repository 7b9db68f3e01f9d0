"""Lists of positions as bit masks in base64, each written once: the plan of a large model repeats a few long ones."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np

from secateur.errors import PlanError

_LONGEST = 2**24  # positions of one dimension; a longer one is written as a list
_MOST_BITS = 2**26  # of all masks together; what they take once read is many times their text


class MaskTable:
    """The masks that a plan writes, in the order in which they come up.

    >>> masks = MaskTable()
    >>> masks.number((0, 2, 9)), masks.number((1,)), masks.number((0, 2, 9))
    (0, 1, 0)
    >>> masks.texts
    ['BQI=', 'Ag==']
    >>> read_masks(masks.texts)
    [(0, 2, 9), (1,)]

    Bit i of byte j says whether position 8j + i stays. The last byte is not zero.
    """

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # by the identity of a list: most are one object in many places
        self._texts: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        return list(self._texts)

    def number(self, index: Sequence[int]) -> int | list[int]:
        """The number of the mask for a list of positions; the list itself where it is not one that a mask can say."""
        if id(index) not in self._known:
            positions = np.array(index)
            if not len(index) or positions[0] < 0 or positions[-1] >= _LONGEST or (np.diff(positions) <= 0).any():
                return list(index)
            bits = np.zeros(positions[-1] + 1, np.bool_)
            bits[positions] = True
            text = base64.b64encode(np.packbits(bits, bitorder="little").tobytes()).decode()
            self._known[id(index)] = self._texts.setdefault(text, len(self._texts))
        return self._known[id(index)]


def read_masks(items: Any) -> list[tuple[int, ...]]:
    """The positions that each mask of a plan keeps. All share their numbers, which are most of what they take."""
    if not isinstance(items, list) or not all(isinstance(text, str) for text in items):
        raise PlanError("this is not a plan: masks should be a list of text")
    if sum(map(len, items)) * 6 > _MOST_BITS:
        raise PlanError("this is not a plan: its masks are longer than those of any plan")
    masks = [_bits(text) for text in items]
    numbers = tuple(range(max(map(len, masks), default=0)))
    return [tuple(compress(numbers, bits.tolist())) for bits in masks]


def _bits(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise PlanError("this is not a plan: a mask should be base64") from None
    if not data or not data[-1]:
        raise PlanError("this is not a plan: a mask should end with a byte that keeps a position")
    if len(data) * 8 > _LONGEST:
        raise PlanError(f"this is not a plan: a mask for more than {_LONGEST} positions")
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")


__all__ = ["MaskTable", "read_masks"]
