"""An op as a product of data with a weight, whatever its own order of dimensions: what calibration works on.

    out[g, n, o] = Σ_k data[g, n, k] · weight[g, o, k] + bias[g, o]

with groups g, rows n, outputs o, and k that is summed over.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from secateur.compat import aten
from secateur.ops.record import part

WHOLE = (aten.linear.default, aten.matmul.default)  # products that arrive as one op in inference mode


def is_product(op: Any) -> bool:
    """Whether an op is a product of data with a weight.

    >>> is_product(aten.addmm.default), is_product(aten.linear.default), is_product(aten.add.Tensor)
    (True, True, False)
    """
    return op in WHOLE or part(op, "product") is not None


@dataclass(frozen=True)
class Sample:
    """Which rows of a product to look at: every so many along each dimension, `step` inputs at a time."""

    step: int
    every: int = 1
    offset: int = 0

    @property
    def spots(self) -> slice:
        """Along one dimension."""
        return slice(self.offset % self.every, None, self.every)


@dataclass(frozen=True, eq=False)
class MatrixProduct(ABC):
    """One op with its operands; `weight` as the op was given it."""

    data: Tensor
    weight: Tensor
    bias: Tensor | None
    groups: int

    @abstractmethod
    def canonical(self, weight: Tensor) -> Tensor:
        """The weight, or numbers that broadcast to it, as (groups, outputs, summed); 1 where these do not vary."""

    @abstractmethod
    def write(self, weight: Tensor) -> None:
        """Put values, given as (groups, outputs, summed), into the weight."""

    @property
    @abstractmethod
    def places(self) -> tuple[int, ...]:
        """The shape of the data without what is summed over and without groups: there is an output for each."""

    @property
    @abstractmethod
    def summed(self) -> int:
        """How many elements a sum is over."""

    @property
    def inputs(self) -> int:
        """How many of these are at one place of a kernel: an element of each input, and then the next place's."""
        return self.summed

    @abstractmethod
    def sample(self, rows: int, offset: int = 0) -> Sample:
        """A choice of about `rows` of the rows, spread evenly; all if there are no more."""

    @abstractmethod
    def rows(self, sample: Sample) -> Iterator[Tensor]:
        """The data as (groups, rows, summed), some at a time."""

    @abstractmethod
    def outputs(self, out: Tensor, sample: Sample) -> Iterator[Tensor]:
        """An output of the op as (groups, rows, outputs), some at a time."""

    @property
    def affine(self) -> bool:
        """Whether what is added to the sums, if anything is, is one number per output."""
        return True

    @property
    def shift(self) -> Tensor | None:
        """The bias as (groups, 1, outputs)."""
        return None if self.bias is None else self.bias.view(self.groups, 1, -1)


def flattened(tensor: Tensor, order: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> Tensor:
    """Dimensions put in order and merged group by group; a group along which nothing varies stays 1.

    `sizes` are those of the dimensions where the tensor does not broadcast.
    """
    tensor = tensor.permute([i for group in order for i in group])
    at = 0
    shape, merged = [], []
    for group in order:
        own = tensor.shape[at : at + len(group)]
        varies = any(n != 1 for n in own)
        full = [sizes[i] for i in group] if varies else [1] * len(group)
        shape += full
        merged.append(math.prod(full))
        at += len(group)
    return tensor.expand(shape).reshape(merged)
