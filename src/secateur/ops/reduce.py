"""Ops that sum, average, normalise or rank over dimensions."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.axes import Layout, unify
from secateur.compat import aten
from secateur.ops.absent import absent_lines, count, filled, gone, mark
from secateur.ops.record import named, op
from secateur.ops.value import Call, Value


def _dims(x: Value | Tensor, dim: Any) -> list[int]:
    rank = len(x.shape)
    if dim is None or dim == []:
        return list(range(rank))
    rank = rank or 1
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


@op(aten.sum.dim_IntList, aten.nansum.default, aten.sum.default, called="sum nansum")
def sum_(call: Call, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    """out = Σ x over some dimensions."""
    return _reduced(call, x, _dims(x, dim), keepdim, needs_zero=True)


@sum_.absent
def _(op: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    over = _dims(x, dim)
    out = aten.sum.dim_IntList(filled(x), over, keepdim, **kwargs)
    return mark(out, count(x, over, keepdim) == 0)


@op(aten.linalg_vector_norm.default, called="linalg_vector_norm norm")
def vector_norm(call: Call, x: Value, order: float = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    """out = (Σ |x|^p)^(1/p)."""
    return _reduced(call, x, _dims(x, dim), keepdim, needs_zero=order > 0)


def norm_of_present(x: Tensor, order: float, over: list[int], keepdim: bool, **kwargs: Any) -> Tensor:
    """(Σ |x|^p)^(1/p) over what is present."""
    nothing = 0.0 if order > 0 else math.inf  # which a norm of a negative order passes over
    out = aten.linalg_vector_norm.default(filled(x, nothing), order, over, keepdim, **kwargs)
    if order == 0:
        out = aten.linalg_vector_norm.default(filled(x), order, over, keepdim, **kwargs)
    return mark(out, count(x, over, keepdim) == 0)


@vector_norm.absent
def _(op: Any, x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    return norm_of_present(x, order, _dims(x, dim), keepdim, **kwargs)


@op(aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def norm(call: Call, x: Value, p: Any, dim: Any, keepdim: bool = False, **_: Any) -> Value:
    """out = (Σ |x|^p)^(1/p)."""
    return vector_norm(call, x, 2 if p is None else p, dim, keepdim)


@norm.absent
def _(op: Any, x: Tensor, p: Any, dim: Any, keepdim: bool = False, **kwargs: Any) -> Tensor:
    return norm_of_present(x, 2 if p is None else p, _dims(x, dim), keepdim, **kwargs)


@op(aten.norm.Scalar)
def norm_all(call: Call, x: Value, p: float = 2) -> Value:
    """out = (Σ |x|^p)^(1/p) over everything."""
    return vector_norm(call, x, p)


@norm_all.absent
def _(op: Any, x: Tensor, p: float = 2) -> Tensor:
    return norm_of_present(x, p, _dims(x, None), False)


@op(aten.count_nonzero.default, called="count_nonzero")
def count_nonzero(call: Call, x: Value, dim: int | None = None) -> Value:
    """out = Σ [x ≠ 0] over one dimension or all."""
    return _reduced(call, x, _dims(x, dim), False, needs_zero=True)


@count_nonzero.absent
def _(op: Any, x: Tensor, dim: int | None = None) -> Tensor:
    return op(filled(x), dim)


@op(aten.logsumexp.default, called="logsumexp")
def logsumexp(call: Call, x: Value, dim: Any, keepdim: bool = False) -> Value:
    """out = log Σ exp(x) over some dimensions."""
    return Value(statistic(call, x, dim, keepdim).dims, False)


@logsumexp.absent
def _(op: Any, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    return mark(op(filled(x, -math.inf), dim, keepdim), count(x, _dims(x, dim), keepdim) == 0)


@op("_cdist_forward.default _euclidean_dist.default")
def distances(call: Call, a: Value, b: Value, p: float = 2, *_: Any) -> Value:
    """out[…, i, j] = (Σ_k |a[…, i, k] - b[…, j, k]|^p)^(1/p)."""
    for one, other in zip(a.dims[:-2], b.dims[:-2], strict=True):
        unify(one, other)
    unify(a.dims[-1], b.dims[-1])
    for x in (a, b):  # where both are zero at removed positions, so is their difference
        call.reduce(x, len(x.dims) - 1, needs_zero=p > 0)
    return Value([*a.dims[:-1], b.dims[-2]], False)


@distances.absent
def _(op: Any, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    rows, columns = absent_lines(a, [-1]), absent_lines(b, [-1])
    return mark(op(filled(a), filled(b), *rest), rows | columns.mT)


@op(aten.dist.default, called="dist")
def distance(call: Call, a: Value, b: Value, p: float = 2) -> Value:
    """out = (Σ |a - b|^p)^(1/p) over everything."""
    return vector_norm(call, _together(call, a, b), p)


@distance.absent
def _(op: Any, a: Tensor, b: Tensor, p: float = 2) -> Tensor:
    return norm_of_present(a - b, p, list(range((a - b).ndim)), False)


_NO, _MEAN = range(2)  # what is done with the elements of a loss


def _together(call: Call, *values: Value) -> Value:
    """Elementwise, before anything is summed up; zero where all are."""
    shape = torch.broadcast_shapes(*(v.shape for v in values))
    zero = [all(len(v.dims) >= -i and v.shape[i] == shape[i] and v.is_zero(i) for v in values) for i in _back(shape)]
    return Value(call.broadcast(*values, to=shape), zero)


def _back(shape: Sequence[int]) -> range:
    return range(-len(shape), 0)


@op("mse_loss.default smooth_l1_loss.default huber_loss.default", called="mse_loss smooth_l1_loss huber_loss")
def loss(call: Call, x: Value, target: Value, reduction: int = _MEAN, *_: Any) -> Value:
    """out = Σ f(x - target), or the mean, where f(0) = 0."""
    each = _together(call, x, target)
    return each if reduction == _NO else _reduced(call, each, _dims(each, None), False, reduction != _MEAN)


@loss.absent
def _(op: Any, x: Tensor, target: Tensor, reduction: int = _MEAN, *rest: Any) -> Tensor:
    each = op(x, target, _NO, *rest)
    if reduction == _NO:
        return each
    over = _dims(each, None)
    return mean_of_present(each, over, False) if reduction == _MEAN else aten.nansum.default(each)


def statistic(call: Call, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    """A statistic over some dimensions, which knows how many positions there are."""
    return _reduced(call, x, _dims(x, dim), keepdim, needs_zero=False)


mean = op(aten.mean.dim, aten.mean.default, called=("mean",))(statistic)
truth = op(
    *named("all.default any.default _is_all_true.default _is_any_true.default"),
    *named("all.dim any.dim"),
    called=("all", "any"),
)(statistic)

# The ops over all that is there, or over some dimensions, and the number that changes nothing.
_EXTREMES = {
    aten.amax.default: -math.inf,
    aten.amin.default: math.inf,
    aten.max.default: -math.inf,
    aten.min.default: math.inf,
    aten.prod.default: 1.0,
    aten.prod.dim_int: 1.0,
}
extreme = op(*_EXTREMES, called=("amax", "amin", "max", "min", "prod"))(statistic)


@extreme.absent
def _(op: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    given = () if dim is None else (dim, keepdim)
    return mark(op(filled(x, _EXTREMES[op]), *given, **kwargs), count(x, _dims(x, dim), keepdim) == 0)


def mean_of_present(x: Tensor, over: list[int], keepdim: bool) -> Tensor:
    """The mean over what is present."""
    return filled(x).sum(over, keepdim=keepdim) / count(x, over, keepdim)


@mean.absent
def _(op: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    return mean_of_present(x, _dims(x, dim), keepdim)


def variance_of_present(x: Tensor, over: list[int], correction: Any, keepdim: bool) -> Tensor:
    """The variance over what is present."""
    off = (x - mean_of_present(x, over, True)).masked_fill(gone(x), 0).square().sum(over, keepdim=keepdim)
    return off / (count(x, over, keepdim) - (1 if correction is None else correction))


@op(aten.aminmax.default, called="aminmax")
def extremes(call: Call, x: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    """The smallest and the largest."""
    least = statistic(call, x, dim, keepdim)
    return least, Value(least.dims, least.zero)


@extremes.absent
def _(op: Any, x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    none = count(x, _dims(x, dim), keepdim) == 0
    least, most = (op(filled(x, end), dim=dim, keepdim=keepdim) for end in (math.inf, -math.inf))
    return mark(least[0], none), mark(most[1], none)


@op(aten.median.default, aten.nanmedian.default, called="nanmedian")
def middle(call: Call, x: Value) -> Value:
    """The one in the middle of all."""
    return statistic(call, x)


@middle.absent
def _(op: Any, x: Tensor) -> Tensor:
    return op(x[~gone(x)])


def _enough(call: Call, x: Value, over: list[int], correction: Any) -> None:
    """A variance takes more positions than it is corrected by."""
    least = 1 if correction is None else int(correction)
    for i in over:
        if math.prod(x.shape[j] for j in over if j != i) <= least < x.shape[i]:
            call.sizes.compare(x.dims[i], ">", least)


@op(aten.var.correction, aten.std.correction, called=("var", "std"))
def spread(call: Call, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    """Variance (or deviation) over some dimensions."""
    _enough(call, x, _dims(x, dim), correction)
    return statistic(call, x, dim, keepdim)


@spread.absent
def _(op: Any, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    found = variance_of_present(x, _dims(x, dim), correction, keepdim)
    return found.sqrt() if op is aten.std.correction else found


@op(aten.var_mean.correction, aten.std_mean.correction, called="var_mean std_mean")
def spread_and_mean(
    call: Call, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Value, Value]:
    """Variance (or deviation) and mean over some dimensions."""
    _enough(call, x, _dims(x, dim), correction)
    first = _reduced(call, x, _dims(x, dim), keepdim, needs_zero=False)
    return first, Value(first.dims, first.zero)


@spread_and_mean.absent
def _(op: Any, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    over = _dims(x, dim)
    found = variance_of_present(x, over, correction, keepdim)
    return found.sqrt() if op is aten.std_mean.correction else found, mean_of_present(x, over, keepdim)


@op(
    "_softmax.default _log_softmax.default _safe_softmax.default softmax.int log_softmax.int",
    called="softmax log_softmax",
)
def softmax(call: Call, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    """exp(x) over its sum along a dimension."""
    dim %= len(x.dims) or 1
    if x.dims:
        call.reduce(x, dim, needs_zero=False)
    return Value(x.dims, False)


@softmax.absent
def _(op: Any, x: Tensor, dim: int, *rest: Any, **kwargs: Any) -> Tensor:
    return mark(op(filled(x, -math.inf), dim, *rest, **kwargs), gone(x))


@op(aten.cumsum.default, called="cumsum")
def cumsum(call: Call, x: Value, dim: int, **_: Any) -> Value:
    """out[i] = Σ_{j ≤ i} x[j]."""
    if not x.dims:
        return Value(())
    dim %= len(x.dims)
    call.reduce(x, dim)
    return Value(x.dims, [x.is_zero(i) and i != dim for i in range(len(x.dims))])


@cumsum.absent
def _(op: Any, x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    return mark(op(filled(x), dim, **kwargs), gone(x))


@op(
    "cumprod.default logcumsumexp.default cummax.default cummin.default",
    called="cumprod logcumsumexp cummax cummin",
)
def cumulative(call: Call, x: Value, dim: int, **_: Any) -> Any:
    """A running statistic along a dimension."""
    call.fix(x.dims[dim], "a running statistic")
    return [Value(x.dims, False) for _ in call.outs]


@op(aten.max.dim, aten.min.dim, aten.median.dim, aten.mode.default, called="median mode")
def ranked(call: Call, x: Value, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    """A value and where it is along a dimension."""
    dim %= len(x.dims)
    call.fix(x.dims[dim], "a position of it is an answer")
    first = _reduced(call, x, [dim], keepdim, needs_zero=True)
    return Value(first.dims, False), Value(first.dims, False)


@op(aten.kthvalue.default, called="kthvalue")
def kthvalue(call: Call, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    """The k-th smallest value along a dimension and where it is."""
    return ranked(call, x, dim, keepdim)


@op(aten.argmax.default, aten.argmin.default, called="argmax argmin")
def argmax(call: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """Which position is the largest."""
    over = _dims(x, dim)
    for i in over:
        call.fix(x.dims[i], "a position of it is an answer")
    return Value(_reduced(call, x, over, keepdim, needs_zero=True).dims, False)


@op(
    "sort.default sort.stable argsort.default argsort.stable",
    called="sort argsort msort",
)
def sort(call: Call, x: Value, *args: Any, dim: int = -1, **_: Any) -> list[Value]:
    """Positions of a dimension in another order."""
    given = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
    call.fix(x.dims[given[0] if given else dim], "sorted")
    return [Value(x.dims, False) for _ in call.outs]


@op(aten.topk.default, called="topk")
def topk(call: Call, x: Value, k: int, dim: int = -1, *_: Any) -> list[Value]:
    """The k largest along a dimension, and where they are."""
    dim %= len(x.dims)
    call.fix(x.dims[dim], "the largest are chosen")
    dims = [call.fixed(k) if i == dim else layout for i, layout in enumerate(x.dims)]
    return [Value(dims, False) for _ in call.outs]


@op(aten.histc.default, aten.bincount.default, called="histc bincount")
def histogram(call: Call, x: Value, *others: Any, **_: Any) -> Value:
    """How many elements fall where."""
    call.opaque(x, *(v for v in others if isinstance(v, Value)), reason="elements are counted")
    return Value([call.fixed(n) for n in call.shape])


@op(
    "_fft_c2c.default _fft_r2c.default _fft_c2r.default",
    called="_fft_c2c _fft_r2c _fft_c2r",
)
def fourier(call: Call, x: Value, dim: Sequence[int], *_: Any) -> Value:
    """A Fourier transform mixes all positions of its dimensions."""
    over = _dims(x, list(dim))
    for i in over:
        call.fix(x.dims[i], "a Fourier transform over it")
    dims = [call.fixed(call.shape[i]) if i in over else layout for i, layout in enumerate(x.dims)]
    return Value(dims, [x.is_zero(i) for i in range(len(dims))])
