"""Ops that sum, average, normalise or rank over dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from secateur.axes import Layout
from secateur.trace.registry import rule
from secateur.trace.value import Call, Value

aten = torch.ops.aten


def _dims(x: Value, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(len(x.dims)))
    rank = len(x.dims) or 1
    return [d % rank for d in (dim if isinstance(dim, Sequence) else [dim])]


def _reduced(call: Call, x: Value, over: list[int], keepdim: bool, needs_zero: bool) -> Value:
    """Drop (or keep as one position) the reduced dimensions; say where that is not exact."""
    dims: list[Layout] = []
    zero = []
    for i, layout in enumerate(x.dims):
        if i not in over:
            dims.append(layout)
            zero.append(x.is_zero(i))
        else:
            call.reduce(x, i, needs_zero)
            if keepdim:
                dims.append(call.fixed(1))
                zero.append(True)
    return Value(dims, zero)


@rule(aten.sum.dim_IntList, aten.nansum.default)
def sum_(call: Call, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    """out = Σ x over some dimensions."""
    return _reduced(call, x, _dims(x, dim), keepdim, needs_zero=True)


@rule(aten.sum.default)
def sum_all(call: Call, x: Value, **_: Any) -> Value:
    """out = Σ x."""
    return _reduced(call, x, _dims(x, None), False, needs_zero=True)


@rule(aten.linalg_vector_norm.default)
def vector_norm(call: Call, x: Value, order: float = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    """out = (Σ |x|^p)^(1/p)."""
    return _reduced(call, x, _dims(x, dim), keepdim, needs_zero=order > 0)


@rule(aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def norm(call: Call, x: Value, p: Any, dim: Any, keepdim: bool = False, **_: Any) -> Value:
    """out = (Σ |x|^p)^(1/p)."""
    return vector_norm(call, x, 2 if p is None else p, dim, keepdim)


@rule(aten.norm.Scalar)
def norm_all(call: Call, x: Value, p: float = 2) -> Value:
    """out = (Σ |x|^p)^(1/p) over everything."""
    return vector_norm(call, x, p)


@rule(aten.count_nonzero.default)
def count_nonzero(call: Call, x: Value, dim: int | None = None) -> Value:
    """out = Σ [x ≠ 0] over one dimension or all."""
    return _reduced(call, x, _dims(x, dim), False, needs_zero=True)


@rule(aten.logsumexp.default)
def logsumexp(call: Call, x: Value, dim: Any, keepdim: bool = False) -> Value:
    """out = log Σ exp(x) over some dimensions."""
    return Value(statistic(call, x, dim, keepdim).dims, False)


@rule(aten.mean.dim, aten.amax.default, aten.amin.default)
def statistic(call: Call, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    """A statistic over some dimensions, which knows how many positions there are."""
    return _reduced(call, x, _dims(x, dim), keepdim, needs_zero=False)


@rule(aten.mean.default, aten.max.default, aten.min.default, aten.prod.default)
def statistic_all(call: Call, x: Value, **_: Any) -> Value:
    """A statistic over everything."""
    return _reduced(call, x, _dims(x, None), False, needs_zero=False)


@rule(aten.all.default, aten.any.default, aten._is_all_true.default, aten._is_any_true.default)
def truth_all(call: Call, x: Value, **_: Any) -> Value:
    """Whether all, or any, are true."""
    return _reduced(call, x, _dims(x, None), False, needs_zero=False)


@rule(aten.prod.dim_int, aten.all.dim, aten.any.dim)
def statistic_one(call: Call, x: Value, dim: int, keepdim: bool = False, **_: Any) -> Value:
    """A statistic over one dimension."""
    return _reduced(call, x, _dims(x, dim), keepdim, needs_zero=False)


@rule(aten.var.correction, aten.std.correction)
def spread(call: Call, x: Value, dim: Any = None, *, keepdim: bool = False, **_: Any) -> Value:
    """Variance or deviation over some dimensions."""
    return _reduced(call, x, _dims(x, dim), keepdim, needs_zero=False)


@rule(aten.var_mean.correction, aten.std_mean.correction)
def spread_and_mean(call: Call, x: Value, dim: Any = None, *, keepdim: bool = False, **_: Any) -> tuple[Value, Value]:
    """Variance (or deviation) and mean over some dimensions."""
    first = _reduced(call, x, _dims(x, dim), keepdim, needs_zero=False)
    return first, Value(first.dims, first.zero)


@rule(
    aten._softmax.default,
    aten._log_softmax.default,
    aten._safe_softmax.default,
    aten.softmax.int,
    aten.log_softmax.int,
)
def softmax(call: Call, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    """exp(x) over its sum along a dimension."""
    dim %= len(x.dims) or 1
    if x.dims:
        call.reduce(x, dim, needs_zero=False)
    return Value(x.dims, False)


@rule(aten.cumsum.default)
def cumsum(call: Call, x: Value, dim: int, **_: Any) -> Value:
    """out[i] = Σ_{j ≤ i} x[j]."""
    if not x.dims:
        return Value(())
    dim %= len(x.dims)
    call.reduce(x, dim)
    return Value(x.dims, [x.is_zero(i) and i != dim for i in range(len(x.dims))])


@rule(aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default)
def cumulative(call: Call, x: Value, dim: int, **_: Any) -> Any:
    """A running statistic along a dimension."""
    call.fix(x.dims[dim], "a running statistic")
    return [Value(x.dims, False) for _ in call.outs]


@rule(aten.max.dim, aten.min.dim, aten.median.dim, aten.mode.default, aten.kthvalue.default)
def ranked(call: Call, x: Value, *args: Any, **_: Any) -> tuple[Value, Value]:
    """A value and where it is along a dimension."""
    given = list(args[1:] if call.name == "kthvalue" else args)
    dim = given[0] if given else -1
    keepdim = len(given) > 1 and given[1]
    return _where_ranked(call, x, dim % len(x.dims), keepdim)


def _where_ranked(call: Call, x: Value, dim: int, keepdim: bool) -> tuple[Value, Value]:
    call.fix(x.dims[dim], "a position of it is an answer")
    first = _reduced(call, x, [dim], keepdim, needs_zero=True)
    return Value(first.dims, False), Value(first.dims, False)


@rule(aten.argmax.default, aten.argmin.default)
def argmax(call: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """Which position is the largest."""
    over = _dims(x, dim)
    for i in over:
        call.fix(x.dims[i], "a position of it is an answer")
    return Value(_reduced(call, x, over, keepdim, needs_zero=True).dims, False)


@rule(aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
def sort(call: Call, x: Value, *args: Any, dim: int = -1, **_: Any) -> list[Value]:
    """Positions of a dimension in another order."""
    given = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
    call.fix(x.dims[given[0] if given else dim], "sorted")
    return [Value(x.dims, False) for _ in call.outs]


@rule(aten.topk.default)
def topk(call: Call, x: Value, k: int, dim: int = -1, *_: Any) -> list[Value]:
    """The k largest along a dimension, and where they are."""
    dim %= len(x.dims)
    call.fix(x.dims[dim], "the largest are chosen")
    dims = [call.fixed(k) if i == dim else layout for i, layout in enumerate(x.dims)]
    return [Value(dims, False) for _ in call.outs]


@rule(aten.histc.default, aten.bincount.default)
def histogram(call: Call, x: Value, *others: Any, **_: Any) -> Value:
    """How many elements fall where."""
    call.opaque(x, *(v for v in others if isinstance(v, Value)), reason="elements are counted")
    return Value([call.fixed(n) for n in call.shape])


@rule(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def fourier(call: Call, x: Value, dim: Sequence[int], *_: Any) -> Value:
    """A Fourier transform mixes all positions of its dimensions."""
    over = _dims(x, list(dim))
    for i in over:
        call.fix(x.dims[i], "a Fourier transform over it")
    dims = [call.fixed(call.shape[i]) if i in over else layout for i, layout in enumerate(x.dims)]
    return Value(dims, [x.is_zero(i) for i in range(len(dims))])
