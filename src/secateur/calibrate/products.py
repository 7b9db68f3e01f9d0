"""Products of data with parameters, as ATen ops carry them out: who is multiplied with what."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

aten = torch.ops.aten

_ROWS_PER_COLUMN = 4, 32  # at least and at most
_PRODUCTS = 2**37  # how many there are in second moments; in between, as many rows as make so many
WIDEST = 2**14  # summed elements beyond which there are too many second moments
_CHUNK = 2**22  # elements of an unfolded input at a time


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
class Sample:
    """Which rows of a product to look at: every so many along each dimension, `step` inputs at a time."""

    step: int
    every: int = 1
    offset: int = 0

    @property
    def spots(self) -> slice:
        """Along one dimension."""
        return slice(self.offset % self.every, None, self.every)


@dataclass(frozen=True)
class Product:
    """One op that sums data over a weight: `out[n, g, o] = Σ_k inputs[n, g, k] · weight[g, o, k] + bias`.

    `name` is the parameter that the weight is a view of, `index` says for each of its dimensions which of its indices
    an element of the weight, laid out as (groups, outputs, summed), is at.
    """

    name: str
    bias: str | None
    op: Any
    args: tuple[Any, ...]
    index: Mapping[int, Tensor]  # dimension -> indices, broadcastable to (groups, outputs, summed)
    groups: int = 1

    @property
    def data(self) -> Tensor:
        """What is multiplied with the weight."""
        return self.args[1] if self.op is aten.addmm.default else self.args[0]

    @property
    def weight(self) -> Tensor:
        """As (groups, outputs, summed)."""
        return canonical(self.op, self.args, self.groups)

    @property
    def part(self) -> tuple[str, int]:
        """The parameter, and where in its storage the part of it that is read begins: some are read part by part."""
        return self.name, int(self.weight.storage_offset())

    @property
    def shift(self) -> Tensor | None:
        """The bias as (groups, 1, outputs)."""
        if self.bias is None:
            return None
        return self.args[0 if self.op is aten.addmm.default else 2].view(self.groups, 1, -1)

    @property
    def places(self) -> tuple[int, ...]:
        """The shape of the data without what is summed over and without groups: there is an output for each."""
        if self.op is aten.convolution.default:
            return (len(self.data), *self.data.shape[2:])
        return (self.data.shape[-2],)

    @property
    def narrow(self) -> bool:
        """Whether it sums over so few elements that their second moments can be held."""
        return self.weight.shape[2] <= WIDEST

    def summed(self, dim: int) -> Tensor | None:
        """(groups, summed): the index in a dimension of the parameter that each summed element is at, if it has one."""
        found = self.index.get(dim)
        return None if found is None or found.shape[1] != 1 else found[:, 0]

    @property
    def enough(self) -> int:
        """How many rows tell the moments of the inputs well enough."""
        summed = math.prod(self.args[1].shape[1:]) if self.op is aten.convolution.default else self.data.shape[-1]
        least, most = (max(n * summed, 2**13) for n in _ROWS_PER_COLUMN)
        return min(max(_PRODUCTS // summed**2, least), most)

    def sample(self, rows: int, offset: int = 0) -> Sample:
        """A choice of about `rows` of the rows, spread evenly; all if there are no more."""
        if self.op is not aten.convolution.default:
            return Sample(len(self.data), max(1, self.data.shape[-2] // rows), offset)
        places = _positions(self.data, *self.args[1].shape[2:], args=self.args)
        every, spots = 1, math.prod(places)
        while len(self.data) * spots > 2 * rows and every < max(places):
            every += 1
            spots = math.prod(-(-n // every) for n in places)
        width = self.data.shape[1] * math.prod(self.args[1].shape[2:]) * spots
        return Sample(max(1, _CHUNK // max(width, 1)), every, offset)

    def rows(self, sample: Sample) -> Iterator[Tensor]:
        """The inputs as (groups, rows, summed), some at a time."""
        if self.op is not aten.convolution.default:
            yield _in_groups(self.data)[:, sample.spots]
            return
        for part in self.data.split(sample.step):
            yield _unfold(part, self.args[1].shape[2:], sample.spots, *self.args[3:9])

    def outputs(self, out: Tensor, sample: Sample) -> Iterator[Tensor]:
        """An output of the op as (groups, rows, outputs), some at a time."""
        if self.op is not aten.convolution.default:
            yield _in_groups(out)[:, sample.spots]
            return
        some = out[(slice(None), slice(None), *[sample.spots] * (out.ndim - 2))]
        for part in some.split(sample.step):
            yield part.unflatten(1, (self.groups, -1)).flatten(3).permute(1, 0, 3, 2).flatten(1, 2)

    def write(self, weight: Tensor) -> None:
        """Put values into the parameter, given as (groups, outputs, summed)."""
        into = self.args[2] if self.op is aten.addmm.default else self.args[1]
        if self.op is not aten.convolution.default:
            into.copy_(weight.mT.reshape(into.shape))
        elif self.args[6]:
            shaped = weight.reshape(self.groups, weight.shape[1], -1, *into.shape[2:])
            into.copy_(shaped.flip(tuple(range(3, shaped.ndim))).transpose(1, 2).reshape(into.shape))
        else:
            into.copy_(weight.reshape(into.shape))

    def write_shift(self, shift: Tensor) -> None:
        """Put values into the bias, given as (groups, outputs)."""
        assert self.shift is not None
        self.shift.copy_(shift.unsqueeze(1))


def _in_groups(matrix: Tensor) -> Tensor:
    """A matrix, or one for each group, as one for each group."""
    return matrix if matrix.ndim == 3 else matrix.unsqueeze(0)


def canonical(op: Any, args: tuple[Any, ...], groups: int) -> Tensor:
    """The weight of a product as (groups, outputs, summed)."""
    weight = args[2] if op is aten.addmm.default else args[1]
    if op is not aten.convolution.default:
        return _in_groups(weight).mT
    if args[6]:  # transposed: (in, out / groups, ...), and the kernel runs the other way
        turned = weight.flip(tuple(range(2, weight.ndim))).unflatten(0, (groups, -1)).transpose(1, 2)
        return turned.flatten(2)
    return weight.unflatten(0, (groups, -1)).flatten(2)


def product(op: Any, args: tuple[Any, ...], parameters: Parameters) -> Product | None:
    """What an op is as a product with a parameter; None if it is none."""
    if op is aten.mm.default or op is aten.bmm.default:
        weight, bias = args[1], None
    elif op is aten.addmm.default:
        weight, bias = args[2], args[0]
    elif op is aten.convolution.default:
        weight, bias = args[1], args[2]
    else:
        return None
    name = parameters.name(weight)
    if name is None:
        return None
    groups = args[8] if op is aten.convolution.default else len(_in_groups(weight))
    index = _where(op, args, groups, weight, parameters.tensors[name])
    return None if index is None else Product(name, parameters.name(bias), op, args, index, groups)


def _where(op: Any, args: Any, groups: int, view: Tensor, whole: Tensor) -> dict[int, Tensor] | None:
    """For each dimension of a parameter, its index at each element of a view of it, as (groups, outputs, summed).

    Only axes of the view along which an index changes are kept, so these are small.
    """
    strides = sorted(((stride, dim) for dim, stride in enumerate(whole.stride()) if whole.shape[dim] > 1), reverse=True)
    if math.prod(whole.shape) > 1 and any(s == 0 for s, _ in strides):
        return None
    found: dict[int, Tensor] = {}
    base = view.storage_offset() - whole.storage_offset()
    for stride, dim in strides:
        at: Tensor | None = torch.full((1,) * view.ndim, (base // stride) % whole.shape[dim])
        for i, (size, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
            moved = torch.arange(size) * step // stride % whole.shape[dim]
            if moved.any():
                at = at + moved.view([-1 if j == i else 1 for j in range(view.ndim)])  # type: ignore[operator]
        assert at is not None
        if at.max() >= whole.shape[dim]:
            return None  # a view whose offset and steps share a dimension in a way that is not followed
        found[dim] = _as_canonical(op, args, groups, at, view)
    return found


def _as_canonical(op: Any, args: Any, groups: int, at: Tensor, view: Tensor) -> Tensor:
    """The axes of a view's index in the order (groups, outputs, summed), expanded only where it varies."""
    if op is not aten.convolution.default:
        return _in_groups(at).mT
    transposed = args[6]
    at = at.unflatten(0, (groups, -1)) if at.shape[0] > 1 else at.unsqueeze(0)
    if transposed:
        at = at.flip(tuple(range(3, at.ndim))).transpose(1, 2)
    if any(n > 1 for n in at.shape[2:]):
        ins = view.shape[0] // groups if transposed else view.shape[1]
        at = at.expand(*at.shape[:2], ins, *view.shape[2:])
    return at.flatten(2)


def _positions(x: Tensor, *kernel: int, args: Any) -> list[int]:
    """The spatial size of a convolution's output."""
    dims = len(kernel)
    stride, padding, dilation, out_pad = (list(v) * (dims if len(v) == 1 else 1) for v in (*args[3:6], args[7] or [0]))
    sizes = zip(x.shape[2:], kernel, stride, padding, dilation, out_pad, strict=True)
    if args[6]:
        return [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in sizes]
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in sizes]


def _unfold(
    x: Tensor,
    kernel: Any,
    spots: slice,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    out_pad: Any,
    groups: int,
) -> Tensor:
    """What each output position of a convolution sums over, as (groups, rows, summed)."""
    dims = len(kernel)
    stride, padding, dilation, out_pad = (
        list(v) * (dims if len(v) == 1 else 1) for v in (stride, padding, dilation, out_pad or [0])
    )
    if transposed:
        spread = x.new_zeros(*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)))
        inside = spread
        for i, s in enumerate(stride):
            inside = inside.movedim(2 + i, 0)[::s].movedim(0, 2 + i)
        inside.copy_(x)
        edges = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
        pads = [(edge, edge + o) for edge, o in zip(edges, out_pad, strict=True)]
        x, stride = spread, [1] * dims
    else:
        pads = [(p, p) for p in padding]
    x = F.pad(x, [n for pair in reversed(pads) for n in pair])
    for i, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + i, (k - 1) * d + 1, s)[..., ::d]
    for i in range(dims):
        x = x.movedim(2 + i, 0)[spots].movedim(0, 2 + i)
    x = x.unflatten(1, (groups, -1))  # batch, groups, channels, *positions, *kernel
    order = (1, 0, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims))
    return x.permute(order).flatten(1 + 1 + dims).flatten(1, 1 + dims)
