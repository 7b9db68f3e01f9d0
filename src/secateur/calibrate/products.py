"""Products of data with parameters, as ATen ops carry them out: who is multiplied with what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.ops.product import MatrixProduct
from secateur.ops.record import part

_ROWS_PER_COLUMN = 4, 32  # at least and at most
_PRODUCTS = 2**37  # how many there are in second moments; in between, as many rows as make so many
WIDEST = 2**14  # summed elements beyond which there are too many second moments


# A parameter, where in its storage the part of it that is read begins, and the strides it is read with: some are read
# part by part, and some both as they are and transposed.
Part = tuple[str, int, tuple[int, ...]]


def part_of(name: str, view: Tensor) -> Part:
    """Which part of a parameter a view of it is.

    >>> part_of("weight", torch.zeros(2, 3).t())
    ('weight', 0, (1, 3))
    """
    return name, int(view.storage_offset()), tuple(view.stride())


@dataclass(frozen=True)
class Parameters:
    """Finds the parameter that a tensor is a view of.

    >>> net = nn.Linear(4, 2)
    >>> Parameters.of(net).name(net.weight.t())
    'weight'
    """

    by_storage: Mapping[int, str]
    tensors: Mapping[str, Tensor]
    tied: frozenset[str]

    @staticmethod
    def of(model: nn.Module) -> Parameters:
        """Every parameter and buffer of a model; one that has several names goes by its first."""
        by_storage: dict[int, str] = {}
        tensors: dict[str, Tensor] = {}
        tied = set()
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, tensor in named:
            first = by_storage.setdefault(tensor.untyped_storage().data_ptr(), name) if tensor.numel() else name
            if first != name:
                tied.add(first)
            tensors[name] = tensor
        return Parameters(by_storage, tensors, frozenset(tied))

    def name(self, tensor: Tensor | None) -> str | None:
        """The parameter that a tensor is, or is a view of; None for anything else."""
        if tensor is None or tensor.numel() == 0:
            return None
        return self.by_storage.get(tensor.untyped_storage().data_ptr())


@dataclass(frozen=True)
class ParameterProduct:
    """One op that sums data over a parameter: `out[n, g, o] = Σ_k inputs[n, g, k] · weight[g, o, k] + bias`.

    `name` is the parameter that the weight is a view of, `index` says for each of its dimensions which of its indices
    an element of the weight, laid out as (groups, outputs, summed), is at.
    """

    name: str
    bias: str | None
    of: MatrixProduct
    index: Mapping[int, Tensor]  # dimension -> indices, broadcastable to (groups, outputs, summed)

    @property
    def weight(self) -> Tensor:
        """As (groups, outputs, summed)."""
        return self.of.canonical(self.of.weight)

    @property
    def part(self) -> Part:
        """The parameter, and which part of it is read, in which order."""
        return part_of(self.name, self.of.weight)

    @property
    def shift(self) -> Tensor | None:
        """The bias as (groups, 1, outputs)."""
        return None if self.bias is None else self.of.shift

    @property
    def narrow(self) -> bool:
        """Whether it sums over so few elements that their second moments can be held."""
        return self.of.summed <= WIDEST

    @property
    def enough(self) -> int:
        """How many rows tell the moments of the inputs well enough."""
        least, most = (max(n * self.of.summed, 2**13) for n in _ROWS_PER_COLUMN)
        return min(max(_PRODUCTS // self.of.summed**2, least), most)

    def write(self, weight: Tensor) -> None:
        """Put values into the parameter, given as (groups, outputs, summed)."""
        self.of.write(weight)

    def write_shift(self, shift: Tensor) -> None:
        """Put values into the bias, given as (groups, outputs)."""
        assert self.shift is not None
        self.shift.copy_(shift.unsqueeze(1))


def product(op: Any, args: tuple[Any, ...], parameters: Parameters) -> ParameterProduct | None:
    """What an op is as a product with a parameter; None if it is none, one of complex numbers or added to a matrix."""
    view = part(op, "product")
    if view is None:
        return None
    of: MatrixProduct = view(*args)
    if of.weight.is_complex() or not of.affine:
        return None
    name = parameters.name(of.weight)
    if name is None:
        return None
    index = _where(of, parameters.tensors[name])
    return None if index is None else ParameterProduct(name, parameters.name(of.bias), of, index)


def _where(of: MatrixProduct, whole: Tensor) -> dict[int, Tensor] | None:
    """For each dimension of a parameter, its index at each element of a view of it, as (groups, outputs, summed).

    Only axes of the view along which an index changes are kept, so these are small.
    """
    view = of.weight
    strides = sorted(((stride, dim) for dim, stride in enumerate(whole.stride()) if whole.shape[dim] > 1), reverse=True)
    if math.prod(whole.shape) > 1 and any(s == 0 for s, _ in strides):
        return None
    found: dict[int, Tensor] = {}
    base = view.storage_offset() - whole.storage_offset()
    for stride, dim in strides:
        at = torch.full((1,) * view.ndim, (base // stride) % whole.shape[dim])
        for i, (size, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
            moved = torch.arange(size) * step // stride % whole.shape[dim]
            if moved.any():
                at = at + moved.view([-1 if j == i else 1 for j in range(view.ndim)])
        if at.max() >= whole.shape[dim]:
            return None  # a view whose offset and steps share a dimension in a way that is not followed
        found[dim] = of.canonical(at)
    return found
