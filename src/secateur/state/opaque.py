"""Objects that hold no other objects but have contents that code can change: arrays, bytes, random generators."""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch


def _put_numbers(array: Any, other: Any) -> None:
    array[...] = other


def _put_all(buffer: Any, other: Any) -> None:
    buffer[:] = other


def _put_draws(generator: Any, other: Any) -> None:
    generator.bit_generator.state = other.bit_generator.state


# kind -> (a copy, what makes the contents of one those of another)
_KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    np.ndarray: (np.copy, _put_numbers),
    bytearray: (bytearray, _put_all),
    array: (copy.copy, _put_all),
    random.Random: (copy.deepcopy, lambda own, other: own.setstate(other.getstate())),
    np.random.Generator: (copy.deepcopy, _put_draws),
    np.random.RandomState: (copy.deepcopy, lambda own, other: own.set_state(other.get_state())),
    torch.Generator: (torch.Generator.clone_state, lambda own, other: own.set_state(other.get_state())),
}


def duplicate(value: Any) -> Any:
    """A copy of such an object; anything else, and what cannot be written to, itself.

    >>> array = np.zeros(2)
    >>> other = duplicate(array)
    >>> other += 1
    >>> array
    array([0., 0.])
    """
    kinds = _KINDS.get(type(value))
    if kinds is not None and not (isinstance(value, np.ndarray) and not value.flags.writeable):
        with suppress(Exception):  # a generator of a kind that has no state to be told
            return kinds[0](value)
    return value


def restore(value: Any, before: Any) -> None:
    """Give an object the contents that a duplicate of it has."""
    _KINDS[type(value)][1](value, before)


__all__ = ["duplicate", "restore"]
