"""The state of the random generators: torch's on the CPU and on the device in use, NumPy's and Python's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Chances:
    """The state of torch's generators.

    >>> before = Chances.now()
    >>> drawn = torch.rand(1)
    >>> before.equals(Chances.now())
    False
    >>> before.restore()
    >>> torch.equal(torch.rand(1), drawn)
    True
    """

    cpu: Tensor
    device: str = ""  # the kind of device that is in use beside it
    others: tuple[Tensor, ...] = ()  # of each of these

    @staticmethod
    def now() -> "Chances":
        """As it is."""
        kind, module = _in_use()
        if module is None:
            return Chances(torch.get_rng_state())
        every = getattr(module, "get_rng_state_all", None)
        return Chances(torch.get_rng_state(), kind, tuple([module.get_rng_state()] if every is None else every()))

    def restore(self) -> None:
        """As it was; of a device that is not here, nothing can be restored."""
        torch.set_rng_state(self.cpu)
        kind, module = _in_use()
        if module is None or kind != self.device:
            return
        every = getattr(module, "set_rng_state_all", None)
        if every is None:
            module.set_rng_state(self.others[0])
        elif len(self.others) == module.device_count():
            every(list(self.others))

    def equals(self, other: "Chances") -> bool:
        """Whether the same numbers will be drawn."""
        here, there = (self.cpu, *self.others), (other.cpu, *other.others)
        return len(here) == len(there) and all(map(torch.equal, here, there))


def _in_use() -> tuple[str, Any]:
    """The kind of device that this process uses beside the CPU, and torch's module for it."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return "", None
    module = torch.get_device_module(device)
    used = getattr(module, "is_initialized", module.is_available)()
    return (device.type, module) if used else ("", None)


def seed(number: int) -> None:
    """What `torch.manual_seed` does, but for devices that are not in use, for each of which it keeps a traceback."""
    torch.default_generator.manual_seed(number)
    _, module = _in_use()
    draw = getattr(module, "manual_seed_all", None) or getattr(module, "manual_seed", None)
    if draw is not None:  # a device of one's own need not draw numbers
        draw(number)


@contextmanager
def same_chances() -> Iterator[None]:
    """The random state of torch, NumPy and Python afterwards as before."""
    states = Chances.now(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        states[0].restore()
        np.random.set_state(states[1])
        random.setstate(states[2])


__all__ = ["Chances", "same_chances", "seed"]
