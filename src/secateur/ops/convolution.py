"""Convolutions of every dimension, plain, grouped, depthwise and transposed.

Each is a contraction over channels, written as its equation, which is carried out for every position of the kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from secateur.axes import Inherent, Layout, Product, factor, fix, hint, unify
from secateur.compat import aten
from secateur.ops.absent import bilinear
from secateur.ops.contraction import Einsum
from secateur.ops.product import MatrixProduct, Sample
from secateur.ops.record import op
from secateur.ops.value import SPACE, Call, Value, layouts_of
from secateur.sizes.explain import Explainer
from secateur.sizes.size import plain

_KERNEL = Inherent("a kernel's own size")
_CHUNK = 2**22  # elements of an unfolded input at a time


_EQUATIONS = {  # of the channels, by whether it is transposed and whether there are groups
    (False, False): Einsum.of("ni,oi->no"),
    (True, False): Einsum.of("ni,io->no"),
    (False, True): Einsum.of("ngi,goi->ngo"),
    (True, True): Einsum.of("ngi,gio->ngo"),
}


@op(aten.convolution.default, aten.convolution_overrideable.default)
def convolution(
    call: Call,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Value:
    """A product of channels for each position of the kernel, wherever that is put."""
    mixed = _EQUATIONS[transposed, groups > 1].axes(call, *_channels(x, weight, transposed, groups))
    channels = mixed.dims[1]
    if groups > 1:
        if math.prod(weight.shape[:2]) > groups:
            hint(channels, "groups", "groups", "groups")
        channels = Product(mixed.dims[1:])
    if bias is not None:
        unify(channels, bias.dims[0])
    for dim in weight.dims[2:]:
        fix(dim, _KERNEL)
    still = Geometry.of(len(weight.dims) - 2, stride, padding, dilation, transposed, output_padding).still
    spatial, zero = [], []
    for i, n in enumerate(call.shape[2:]):
        if weight.shape[2 + i] == 1 and still(i):  # each place is a product of its own
            spatial.append(x.dims[2 + i])
            zero.append(x.is_zero(2 + i) and bias is None)
        else:
            call.fix(x.dims[2 + i], SPACE)
            spatial.append(call.fixed(n, SPACE))
            zero.append(True)
    clean = all(mixed.zero[1:]) and (bias is None or bias.is_zero(0))
    return Value([x.dims[0], channels, *spatial], [False, clean, *zero])


def _channels(x: Value, weight: Value, transposed: bool, groups: int) -> tuple[Value, Value]:
    """The factors of the equation, in groups if there are any."""
    if groups == 1:
        return x, weight
    inputs = Value([x.dims[0], *factor(x.dims[1], groups)], [False, *[x.is_zero(1)] * 2])
    weights = Value([*factor(weight.dims[0], groups), weight.dims[1]], [*[weight.is_zero(0)] * 2, weight.is_zero(1)])
    inputs.storage.made_of = x.storage.made_of
    if not transposed:  # whose first dimension is groups and inputs at once: its zeros do not tell which is unread
        weights.storage.made_of = weight.storage.made_of
    return inputs, weights


@convolution.sizes(*(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in "123"))
def expect_groups(explain: Explainer, out: Tensor, input: Tensor, weight: Tensor, *rest: Any) -> None:
    """(input, weight, bias, stride, padding, dilation or output padding, groups, …)."""
    groups = rest[4]
    if layouts_of(input) and plain(groups) > 1:
        channels = layouts_of(input)[1 - weight.ndim]  # counted from the end: there may be no batch
        explain.expect(groups, factor(channels, plain(groups))[0])


@convolution.sizes("convolution", "convolution_overrideable")
def _(explain: Explainer, out: Tensor, input: Tensor, weight: Tensor, *rest: Any) -> None:
    """(input, weight, bias, stride, padding, dilation, transposed, output padding, groups, …)."""
    expect_groups(explain, out, input, weight, *rest[2:])


@convolution.cost
def _(
    out: Value, x: Value, weight: Value, _b: Any, _s: Any, _p: Any, _d: Any, transposed: bool, _o: Any, groups: int
) -> Iterator[tuple[Layout, ...]]:
    """That of the equation, for each position of the kernel and each place that it is put at."""
    for channels in _EQUATIONS[transposed, groups > 1].cost(*_channels(x, weight, transposed, groups)):
        yield (*channels, *(x if transposed else out).dims[2:], *weight.dims[2:])


@convolution.absent
def _(op: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    out = bilinear(lambda x, weight: op(x, weight, None, *rest), x, weight)
    return out if bias is None else out + bias.reshape(1, -1, *[1] * (out.ndim - 2))


@convolution.resize
def _(args: list[Any], whole: Mapping[int, Sequence[int]]) -> None:
    """`groups` follows the channels: as many as the weight leaves of them, or one each in a transposed depthwise."""
    x, weight = args[0].shape, args[1].shape
    if not args[6]:
        args[8] = max(1, x[1] // weight[1])
    elif args[8] == whole[0][1]:
        args[8] = x[1]


@convolution.product
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> MatrixProduct:
    return _PatchProduct(x, weight, bias, rest[5], Geometry.of(len(weight.shape) - 2, *rest[:5]))


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves over space: one number per dimension of space."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]

    @staticmethod
    def of(rank: int, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any) -> Geometry:
        """As an op is given it: a single number may stand for all."""
        full = [list(v) * (rank if len(v) == 1 else 1) for v in (stride, padding, dilation, output_padding or [0])]
        return Geometry(full[0], full[1], full[2], transposed, full[3])

    def still(self, i: int) -> bool:
        """Whether a kernel of size 1 leaves every place of a dimension where it is."""
        return self.stride[i] == 1 and self.padding[i] == 0 and self.output_padding[i] == 0

    def spots(self, space: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """The spatial size of the output."""
        sizes = zip(space, kernel, self.stride, self.padding, self.dilation, self.output_padding, strict=True)
        if self.transposed:
            return [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in sizes]
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in sizes]

    def spread(self, x: Tensor, kernel: Sequence[int]) -> tuple[Tensor, list[int]]:
        """The input with all that the kernel runs over, and the stride at which it does then."""
        if not self.transposed:
            return F.pad(x, [p for p in reversed(self.padding) for _ in range(2)]), self.stride
        wide = x.new_zeros(*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], self.stride, strict=True)))
        inside = wide
        for i, s in enumerate(self.stride):
            inside = inside.movedim(2 + i, 0)[::s].movedim(0, 2 + i)
        inside.copy_(x)
        edges = [d * (k - 1) - p for d, k, p in zip(self.dilation, kernel, self.padding, strict=True)]
        pads = [(edge, edge + o) for edge, o in zip(edges, self.output_padding, strict=True)]
        return F.pad(wide, [n for pair in reversed(pads) for n in pair]), [1] * len(kernel)


@dataclass(frozen=True, eq=False)
class _PatchProduct(MatrixProduct):
    """A convolution; what each of its outputs sums over is an unfolded patch of the input."""

    geometry: Geometry

    @property
    def _kernel(self) -> Sequence[int]:
        return self.weight.shape[2:]

    def canonical(self, weight: Tensor) -> Tensor:
        weight = weight.unflatten(0, (self.groups, -1)) if weight.shape[0] > 1 else weight.unsqueeze(0)
        if self.geometry.transposed:  # (in, out / groups, …), and the kernel runs the other way
            weight = weight.flip(tuple(range(3, weight.ndim))).transpose(1, 2)
        if any(n > 1 for n in weight.shape[2:]):
            weight = weight.expand(*weight.shape[:2], self.inputs, *self._kernel)
        return weight.flatten(2)

    def write(self, weight: Tensor) -> None:
        if self.geometry.transposed:
            shaped = weight.reshape(self.groups, weight.shape[1], -1, *self._kernel)
            weight = shaped.flip(tuple(range(3, shaped.ndim))).transpose(1, 2)
        self.weight.copy_(weight.reshape(self.weight.shape))

    @property
    def places(self) -> tuple[int, ...]:
        return (len(self.data), *self.data.shape[2:])

    @property
    def summed(self) -> int:
        return self.inputs * math.prod(self._kernel)

    @property
    def inputs(self) -> int:
        return self.weight.shape[0] // self.groups if self.geometry.transposed else self.weight.shape[1]

    def sample(self, rows: int, offset: int = 0) -> Sample:
        places = self.geometry.spots(self.data.shape[2:], self._kernel)
        every, spots = 1, math.prod(places)
        while len(self.data) * spots > 2 * rows and every < max(places):
            every += 1
            spots = math.prod(-(-n // every) for n in places)
        width = self.data.shape[1] * math.prod(self._kernel) * spots
        return Sample(max(1, _CHUNK // max(width, 1)), every, offset)

    def rows(self, sample: Sample) -> Iterator[Tensor]:
        for part in self.data.split(sample.step):
            yield self._unfold(part, sample.spots)

    def _unfold(self, x: Tensor, spots: slice) -> Tensor:
        """What each output position sums over, as (groups, rows, summed)."""
        x, stride = self.geometry.spread(x, self._kernel)
        rank = len(self._kernel)
        for i, (k, s, d) in enumerate(zip(self._kernel, stride, self.geometry.dilation, strict=True)):
            x = x.unfold(2 + i, (k - 1) * d + 1, s)[..., ::d]
        for i in range(rank):
            x = x.movedim(2 + i, 0)[spots].movedim(0, 2 + i)
        x = x.unflatten(1, (self.groups, -1))  # batch, groups, channels, *positions, *kernel
        order = (1, 0, *range(3, 3 + rank), 2, *range(3 + rank, 3 + 2 * rank))
        return x.permute(order).flatten(2 + rank).flatten(1, 1 + rank)

    def outputs(self, out: Tensor, sample: Sample) -> Iterator[Tensor]:
        some = out[(slice(None), slice(None), *[sample.spots] * (out.ndim - 2))]
        for part in some.split(sample.step):
            yield part.unflatten(1, (self.groups, -1)).flatten(3).permute(1, 0, 3, 2).flatten(1, 2)


@convolution.backward(aten.convolution_backward.default)
def _(gradient: Tensor, _x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return weight, gradient.unflatten(1, (rest[6], -1)).flatten(3).permute(1, 0, 3, 2).flatten(1, 2)


@op(aten.im2col.default, called="im2col")
def im2col(call: Call, x: Value, kernel: Any, *_: Any) -> Value:
    """out[n, (c, k), l]: the patches of each channel."""
    dims = list(x.dims)
    for dim in dims[-2:]:
        call.fix(dim, SPACE)
    channels = Product((dims[-3], call.fixed(kernel[0] * kernel[1], "the positions of a patch")))
    lead = dims[:-3]
    return Value(
        [*lead, channels, call.fixed(call.shape[-1], SPACE)],
        [*x.zero[: len(lead)], x.is_zero(len(lead)), True],
    )


@op(aten.col2im.default, called="col2im")
def col2im(call: Call, x: Value, output_size: Any, kernel: Any, *_: Any) -> Value:
    """out[n, c, …]: patches added back into an image."""
    patch = kernel[0] * kernel[1]
    channels, inner = factor(x.dims[-2], x.dims[-2].size // patch)
    call.fix(inner, "the positions of a patch")
    call.fix(x.dims[-1], SPACE)
    lead = list(x.dims[:-2])
    spatial = [call.fixed(n, SPACE) for n in call.shape[-2:]]
    return Value([*lead, channels, *spatial], [*x.zero[: len(lead)], x.is_zero(len(lead)), True, True])
