"""Products that sum over a dimension of both operands."""

from __future__ import annotations

from typing import Any

import torch

from secateur.axes import hint, unify
from secateur.trace.registry import rule
from secateur.trace.value import Call, Value

aten = torch.ops.aten

_GROUPED_BYTES = 16  # the rows of what experts multiply are multiples of this


@rule(aten.mm.default)
def mm(call: Call, a: Value, b: Value) -> Value:
    """out[i, j] = Σ_k a[i, k] b[k, j]."""
    call.contract(a, 1, b, 0)
    call.tracer.cost(call, a.dims[0], a.dims[1], b.dims[1])
    return Value([a.dims[0], b.dims[1]], [a.is_zero(0), b.is_zero(1)])


@rule(aten.addmm.default)
def addmm(call: Call, bias: Value, a: Value, b: Value, **scale: Any) -> Value:
    """out[i, j] = bias[j] + Σ_k a[i, k] b[k, j]."""
    return _add(call, bias, mm(call, a, b))


def _add(call: Call, bias: Value, product: Value) -> Value:
    """Elementwise sum: zero along a dimension where both are."""
    dims = call.broadcast(product, bias)
    lead = len(dims) - len(bias.dims)
    zero = [
        product.is_zero(i) and i >= lead and bias.dims[i - lead].size == dims[i].size and bias.is_zero(i - lead)
        for i in range(len(dims))
    ]
    return Value(dims, zero)


@rule(aten.bmm.default)
def bmm(call: Call, a: Value, b: Value) -> Value:
    """out[n, i, j] = Σ_k a[n, i, k] b[n, k, j]."""
    unify(a.dims[0], b.dims[0])
    call.contract(a, 2, b, 1)
    call.tracer.cost(call, a.dims[0], a.dims[1], a.dims[2], b.dims[2])
    return Value([a.dims[0], a.dims[1], b.dims[2]], [a.is_zero(0) or b.is_zero(0), a.is_zero(1), b.is_zero(2)])


@rule(aten.baddbmm.default)
def baddbmm(call: Call, bias: Value, a: Value, b: Value, **scale: Any) -> Value:
    """out = bias + bmm(a, b)."""
    return _add(call, bias, bmm(call, a, b))


@rule(aten.addbmm.default)
def addbmm(call: Call, bias: Value, a: Value, b: Value, **scale: Any) -> Value:
    """out[i, j] = bias[i, j] + Σ_n Σ_k a[n, i, k] b[n, k, j]."""
    call.contract(a, 0, b, 0)
    call.contract(a, 2, b, 1)
    return _add(call, bias, Value([a.dims[1], b.dims[2]], [a.is_zero(1), b.is_zero(2)]))


@rule(aten.mv.default)
def mv(call: Call, a: Value, x: Value) -> Value:
    """out[i] = Σ_k a[i, k] x[k]."""
    call.contract(a, 1, x, 0)
    return Value([a.dims[0]], [a.is_zero(0)])


@rule(aten.addmv.default)
def addmv(call: Call, bias: Value, a: Value, x: Value, **scale: Any) -> Value:
    """out[i] = bias[i] + Σ_k a[i, k] x[k]."""
    return _add(call, bias, mv(call, a, x))


@rule(aten.dot.default, aten.vdot.default)
def dot(call: Call, a: Value, b: Value) -> Value:
    """out = Σ_k a[k] b[k]."""
    call.contract(a, 0, b, 0)
    return Value([])


@rule(aten._grouped_mm.default)
def grouped_mm(call: Call, a: Value, b: Value, ends: Value | None = None, *_: Any, **__: Any) -> Value:
    """out[t, j] = Σ_k a[t, k] b[e, k, j], where e is the expert that token t went to; tokens are sorted by it."""
    if ends is not None:
        call.opaque(ends, reason="experts are chosen by data")
    if len(a.dims) != 2 or len(b.dims) != 3:
        call.opaque(a, b, reason="only tokens × experts is understood")
        return Value([call.fixed(n) for n in call.shape])
    call.contract(a, 1, b, 1)
    call.fix(a.dims[0], "experts are chosen by data")
    call.fix(b.dims[0], "experts are chosen by data")
    hint(b.dims[0], "experts")
    for width in (a.dims[1], b.dims[2]):
        call.tracer.multiple(width, max(1, _GROUPED_BYTES // call.itemsize))
    call.tracer.cost(call, a.dims[0], a.dims[1], b.dims[2])
    return Value([a.dims[0], b.dims[2]], [a.is_zero(0), b.is_zero(2)])


@rule(aten._trilinear.default)
def trilinear(
    call: Call, a: Value, b: Value, c: Value, ea: Any, eb: Any, ec: Any, summed: Any, unroll: int = 1
) -> Value:
    """The product of three tensors with unit dimensions put in, summed over some dimensions."""
    operands = []
    for value, new in ((a, ea), (b, eb), (c, ec)):
        dims, zero = list(value.dims), list(value.zero)
        for at in new:
            dims.insert(at, call.fixed(1))
            zero.insert(at, False)
        operands.append(Value(dims, zero))
    result, flags = [], []
    for i in range(len(operands[0].dims)):
        size = max(v.dims[i].size for v in operands)
        along = [v for v in operands if v.dims[i].size == size]
        for other in along[1:]:
            unify(along[0].dims[i], other.dims[i])
        clean = any(v.is_zero(i) for v in along)
        if i not in summed:
            result.append(along[0].dims[i])
            flags.append(clean)
            continue
        call.sums(along[0].dims[i], a, b, c)
        if not clean:
            call.note(along[0].dims[i], "sums over removed positions that are not zero")
    return Value(result, flags)
