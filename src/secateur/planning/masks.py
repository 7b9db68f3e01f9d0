"""Lists of positions as bit masks in base64, each written once: the plan of a large model repeats a few long ones.

Most of the long ones repeat a short one themselves: a dimension of heads times positions in each keeps the same
positions of every head that stays, one of two halves the same of both. Such a list is written as which copies stay,
what stays in each, and how far apart they begin.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from secateur.errors import PlanError

_LONGEST = 2**24  # positions of one dimension; a longer one is written as a list
_MOST_BITS = 2**26  # of all masks together; what they take once read is many times their text
_MOST_COPIED = 2**23  # positions of all masks that are made of others
_SHORT = 2**8  # bits of a mask that is written as it is
_Array = np.ndarray[Any, np.dtype[np.int64]]


class MaskTable:
    """The masks that a plan writes, in the order in which they come up.

    >>> masks = MaskTable()
    >>> masks.number((0, 2, 9)), masks.number((1,)), masks.number((0, 2, 9))
    (0, 1, 0)
    >>> masks.number([400 * head + position for head in (0, 1, 3) for position in (1, 3)])
    4
    >>> masks.texts
    ['BQI=', 'Ag==', 'Cw==', 'Cg==', [2, 3, 400]]
    >>> read_masks(masks.texts)
    [(0, 2, 9), (1,), (0, 1, 3), (1, 3), (1, 3, 401, 403, 1201, 1203)]

    Bit i of byte j says whether position 8j + i stays. The last byte is not zero. Three numbers are the mask of the
    copies, the mask within a copy (both come before), and the distance of the copies.
    """

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # by the identity of a list: most are one object in many places
        self._texts: dict[str | tuple[int, int, int], int] = {}

    @property
    def texts(self) -> list[str | list[int]]:
        return [text if isinstance(text, str) else list(text) for text in self._texts]

    def number(self, index: Sequence[int]) -> int | list[int]:
        """The number of the mask for a list of positions; the list itself where it is not one that a mask can say."""
        if id(index) not in self._known:
            positions = np.array(index)
            if not len(index) or positions[0] < 0 or positions[-1] >= _LONGEST or (np.diff(positions) <= 0).any():
                return list(index)
            self._known[id(index)] = self._number(positions)
        return self._known[id(index)]

    def _number(self, positions: _Array) -> int:
        found = _copies(positions) if positions[-1] >= _SHORT else None
        if found is None:
            bits = np.zeros(positions[-1] + 1, np.bool_)
            bits[positions] = True
            text = base64.b64encode(np.packbits(bits, bitorder="little").tobytes()).decode()
            return self._texts.setdefault(text, len(self._texts))
        copies, within, step = found
        made = self._number(copies), self._number(within), step
        return self._texts.setdefault(made, len(self._texts))


def _copies(positions: _Array) -> tuple[_Array, _Array, int] | None:
    """Which copies stay, what of each, and how far apart they are, where that is at most half as long to write."""
    best, least, count = None, int(positions[-1]) // 2, len(positions)
    low = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    for each in sorted({*low, *(count // n for n in low)} - {count}):
        parts = positions.reshape(-1, each)
        starts = parts[:, 0] - parts[0, 0]
        step = int(np.gcd.reduce(starts))
        length = int(starts[-1]) // step + int(parts[0, -1])
        if length < least and parts[0, -1] - parts[0, 0] < step and (parts - starts[:, None] == parts[0]).all():
            best, least = (starts // step, parts[0], step), length
    return best


def read_masks(items: Any) -> list[tuple[int, ...]]:
    """The positions that each mask of a plan keeps. All share their numbers, which are most of what they take."""
    if not isinstance(items, list) or not all(isinstance(item, str | list) for item in items):
        raise PlanError("this is not a plan: masks should be a list of text")
    if sum(len(item) for item in items if isinstance(item, str)) * 6 > _MOST_BITS:
        raise PlanError("this is not a plan: its masks are longer than those of any plan")
    found: list[_Array] = []
    copied = 0
    for item in items:
        if isinstance(item, str):
            found.append(np.flatnonzero(_bits(item)))
            continue
        copies, within, step = _parts(item, found)
        copied += len(copies) * len(within)
        if copied > _MOST_COPIED or int(copies[-1]) * step + int(within[-1]) >= _LONGEST:
            raise PlanError("this is not a plan: its masks keep more positions than those of any plan")
        found.append((copies[:, None] * step + within).reshape(-1))
    numbers = tuple(range(max((int(each[-1]) + 1 for each in found), default=0)))
    return [tuple([numbers[i] for i in each.tolist()]) for each in found]


def _parts(item: list[Any], found: Sequence[_Array]) -> tuple[_Array, _Array, int]:
    """Of a mask that is made of two that come before it: these, and the distance of the copies."""
    if len(item) != 3 or not all(type(n) is int and n >= 0 for n in item) or max(item[:2]) >= len(found):
        raise PlanError("this is not a plan: a mask that is made of others is three numbers, two of masks before it")
    copies, within, step = found[item[0]], found[item[1]], item[2]
    if within[-1] - within[0] >= step or step >= _LONGEST:
        raise PlanError("this is not a plan: the copies in a mask should lie one after the other")
    return copies, within, step


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
