"""Products that sum over what their operands share, each written as its equation.

`"ik,kj->ij"` says all there is to know of a matrix product: dimensions with the same letter are one axis, letters that
the result lacks are summed over, the cost is the product of the sizes of all letters, and a result is zero along a
letter where one of its factors is. Ties, cost, zeros and the view as a product with a weight follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.axes import Layout, hint, unify
from secateur.compat import aten
from secateur.errors import VerifyError
from secateur.ops.absent import bilinear
from secateur.ops.product import MatrixProduct, Sample, flattened
from secateur.ops.record import Record, op
from secateur.ops.value import Call, Value

Letters = Sequence[Any]

_GROUPED_BYTES = 16  # the rows of what experts multiply are multiples of this


@dataclass(frozen=True)
class Einsum:
    """Which dimensions of the factors and the result are the same.

    >>> Einsum.of("ik,kj->ij").summed
    ['k']
    """

    factors: tuple[Letters, ...]
    result: Letters

    @staticmethod
    def of(text: str) -> Einsum:
        """`"ik,kj->ij"`."""
        factors, _, result = text.partition("->")
        return Einsum(tuple(factors.split(",")), result)

    @property
    def letters(self) -> list[Any]:
        """Each once, in order."""
        return list(dict.fromkeys(letter for factor in self.factors for letter in factor))

    @property
    def summed(self) -> list[Any]:
        """The letters that the result lacks."""
        return [letter for letter in self.letters if letter not in self.result]

    def places(self, values: Sequence[Value], letter: Any) -> list[tuple[Value, int]]:
        """Where a letter stands: the factors that have it, and their dimension."""
        pairs = zip(values, self.factors, strict=True)
        return [(value, list(factor).index(letter)) for value, factor in pairs if letter in factor]

    def axes(self, call: Call, *values: Value) -> Value:
        """Tie the dimensions that share a letter, sum over those that the result lacks."""
        dims, zero = {}, {}
        for letter in self.letters:
            found = self.places(values, letter)
            dims[letter] = found[0][0].dims[found[0][1]]
            if letter in self.result:
                for value, i in found[1:]:
                    unify(dims[letter], value.dims[i])
                zero[letter] = any(value.is_zero(i) for value, i in found)
            else:
                call.contract(*found)
        return Value([dims[letter] for letter in self.result], [zero[letter] for letter in self.result])

    def cost(self, *values: Value) -> Iterator[tuple[Layout, ...]]:
        """A multiply-accumulate for each combination of positions of all letters."""
        places = [self.places(values, letter)[0] for letter in self.letters]
        yield tuple(value.dims[i] for value, i in places)

    def product(self, data: Tensor, weight: Tensor, bias: Tensor | None) -> MatrixProduct:
        """With data as the first factor and a weight as the second."""
        one, two = (list(factor) for factor in self.factors)
        groups = [letter for letter in two if letter in one and letter in self.result]
        outputs = [letter for letter in two if letter not in one]
        rows = [letter for letter in one if letter not in two]
        orders = (
            _order(one, groups, rows, self.summed),
            _order(two, groups, outputs, self.summed),
            _order(list(self.result), groups, rows, outputs),
        )
        number = weight.shape[two.index(groups[0])] if groups else 1
        return _EinsumProduct(data, weight, bias, number, orders)


def _order(letters: list[Any], *wanted: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(letters.index(letter) for letter in group) for group in wanted)


@dataclass(frozen=True, eq=False)
class _EinsumProduct(MatrixProduct):
    """A matrix product, or one for each group."""

    orders: tuple[tuple[tuple[int, ...], ...], ...]  # of data, weight and result: their dimensions in the common order

    @property
    def affine(self) -> bool:
        outputs = math.prod(self.weight.shape[i] for i in self.orders[1][1])
        return self.bias is None or self.bias.numel() == self.bias.shape[-1:].numel() == outputs

    def canonical(self, weight: Tensor) -> Tensor:
        return flattened(weight, self.orders[1], tuple(self.weight.shape))

    def write(self, weight: Tensor) -> None:
        order = [i for group in self.orders[1] for i in group]
        back = [order.index(i) for i in range(len(order))]
        self.weight.copy_(weight.reshape([self.weight.shape[i] for i in order]).permute(back))

    @property
    def places(self) -> tuple[int, ...]:
        return (self._rows(self.data, 0).shape[1],)

    @property
    def summed(self) -> int:
        return self._rows(self.data, 0).shape[2]

    def sample(self, rows: int, offset: int = 0) -> Sample:
        return Sample(len(self.data), max(1, self.places[0] // rows), offset)

    def rows(self, sample: Sample) -> Iterator[Tensor]:
        yield self._rows(self.data, 0)[:, sample.spots]

    def outputs(self, out: Tensor, sample: Sample) -> Iterator[Tensor]:
        yield self._rows(out, 2)[:, sample.spots]

    def _rows(self, tensor: Tensor, which: int) -> Tensor:
        return flattened(tensor, self.orders[which], tuple(tensor.shape))


def contraction(
    text: str, *ops: Any, added_to: bool = False, weighed: bool = False, called: str | Iterable[Any] = ()
) -> Record:
    """The record of a product. `added_to`: something is added to it, before the factors.

    `weighed`: where the second factor is a parameter, the first is data that goes through a layer.
    """
    einsum = Einsum.of(text)

    def axes(call: Call, *values: Any, **_: Any) -> Value:
        if not added_to:
            return einsum.axes(call, *values)
        return _sum(call, values[0], einsum.axes(call, *values[1:]))

    record = op(*ops, called=called)(axes)
    count = len(einsum.factors)
    factors = slice(1, 1 + count) if added_to else slice(count)
    record.cost(lambda _out, *values, **__: einsum.cost(*values[factors]))
    record.absent(_sum_of_present if added_to else bilinear)
    if weighed:
        record.product(
            lambda *args, **_: einsum.product(*args[factors], bias=args[0] if added_to else None)  # type: ignore[misc]
        )
    return record


def _sum(call: Call, added: Value, product: Value) -> Value:
    """Elementwise sum: zero along a dimension where both are."""
    dims = call.broadcast(product, added)
    lead = len(dims) - len(added.dims)
    zero = [
        product.is_zero(i) and i >= lead and added.dims[i - lead].size == dims[i].size and added.is_zero(i - lead)
        for i in range(len(dims))
    ]
    return Value(dims, zero)


def _sum_of_present(op: Any, added: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    def product(a: Tensor, b: Tensor) -> Tensor:
        if a.layout is not torch.strided:
            return alpha * aten.mm.default(a, b)
        return op(added.new_zeros(()), a, b, beta=0, alpha=alpha)

    out = bilinear(product, a, b)
    return out + beta * added if beta else out


contraction("ik,kj->ij", aten.mm.default, weighed=True, called="mm")
contraction("nik,nkj->nij", aten.bmm.default, weighed=True, called="bmm")
contraction("ik,k->i", aten.mv.default, called="mv")
contraction("k,k->", aten.dot.default, aten.vdot.default, called="dot vdot")
contraction("ik,kj->ij", aten.addmm.default, added_to=True, weighed=True, called="addmm")
contraction("ik,kj->ij", aten._sparse_addmm.default, added_to=True)
contraction("nik,nkj->nij", aten.baddbmm.default, added_to=True, called="baddbmm")
contraction("nik,nkj->ij", aten.addbmm.default, added_to=True, called="addbmm")
contraction("ik,k->i", aten.addmv.default, added_to=True, called="addmv")
contraction("i,j->ij", aten.addr.default, added_to=True, called="addr")


# experts ---------------------------------------------------------------------------------------------------------


@op(aten._grouped_mm.default)
def grouped_mm(call: Call, a: Value, b: Value, ends: Value | None = None, *_: Any, **__: Any) -> Value:
    """out[t, j] = Σ_k a[t, k] b[e, k, j], where e is the expert that token t went to; tokens are sorted by it."""
    if ends is not None:
        call.opaque(ends, reason="experts are chosen by data")
    if len(a.dims) != 2 or len(b.dims) != 3:
        call.opaque(a, b, reason="only tokens × experts is understood")
        return Value([call.fixed(n) for n in call.shape])
    call.contract((a, 1), (b, 1))
    call.fix(a.dims[0], "experts are chosen by data")
    call.fix(b.dims[0], "experts are chosen by data")
    hint(b.dims[0], "experts")
    for width in (a.dims[1], b.dims[2]):
        call.sizes.multiple(width, max(1, _GROUPED_BYTES // call.itemsize))
    return Value([a.dims[0], b.dims[2]], [a.is_zero(0), b.is_zero(2)])


@grouped_mm.cost
def _(out: Value, a: Value, b: Value, *_: Any, **__: Any) -> Iterator[tuple[Layout, ...]]:
    """Each token goes through one expert; of matrices side by side, each goes through its own."""
    yield (*out.dims, a.dims[-1])


grouped_mm.absent(bilinear)
grouped_mm.known_as("transformers::grouped_mm_fallback")  # which runs where torch has no kernel


@grouped_mm.fake
def _(a: Tensor, b: Tensor, *_: Any, **__: Any) -> Tensor:
    """Torch's fake kernel knows one dtype only."""
    shape = a.shape[:1] if a.ndim == 2 else a.shape[:2]
    return a.new_empty(*shape, b.shape[-1])


@grouped_mm.precise
def _(itemsize: int, a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """The rows of each group times its matrix; torch's kernel knows no doubles, and takes rows of 16 bytes only."""
    multiple = _GROUPED_BYTES // itemsize
    for width in (a.shape[-1], b.shape[-1]):
        if width % multiple:
            raise VerifyError(
                "torch's grouped matrix product, which experts run on, takes widths that are multiples of "
                f"{multiple}, and one would be {width}; plan with round_to={multiple}"
            )
    ends = offs.tolist()
    rows = [a[start:end] @ b[i] for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*rows, a.new_zeros(a.shape[0] - ends[-1], b.shape[-1])])


# three factors ---------------------------------------------------------------------------------------------------


def _three(values: Sequence[Value], new: Sequence[Sequence[int]], summed: Sequence[int]) -> Einsum:
    """The equation of `_trilinear`: positions among all dimensions, of which each factor lacks those in its `new`.

    A dimension of one position beside longer ones stands for all of theirs, so it has no letter.
    """
    rank = len(values[0].dims) + len(new[0])
    own = [[i for i in range(rank) if i not in absent] for absent in new]
    sizes = {i: [v.dims[o.index(i)].size for v, o in zip(values, own, strict=True) if i in o] for i in range(rank)}
    size = {i: next((n for n in given if n != 1), 1) for i, given in sizes.items()}
    spread = [
        [i if v.dims[o.index(i)].size == size[i] else ("one", i, n) for i in o]
        for n, (v, o) in enumerate(zip(values, own, strict=True))
    ]
    return Einsum(tuple(spread), [i for i in range(rank) if i not in summed])


@op(aten._trilinear.default)
def trilinear(
    call: Call, a: Value, b: Value, c: Value, ea: Any, eb: Any, ec: Any, summed: Any, unroll: int = 1
) -> Value:
    """The product of three tensors with unit dimensions put in, summed over some dimensions."""
    return _three((a, b, c), (ea, eb, ec), summed).axes(call, a, b, c)


@trilinear.cost
def _(out: Value, a: Value, b: Value, c: Value, ea: Any, eb: Any, ec: Any, summed: Any, *_: Any) -> Any:
    return _three((a, b, c), (ea, eb, ec), summed).cost(a, b, c)


trilinear.absent(bilinear)
