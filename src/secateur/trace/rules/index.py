"""Ops that pick positions by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from secateur.axes import Layout, unify
from secateur.trace.registry import rule
from secateur.trace.value import Call, Value

aten = torch.ops.aten
_CHOSEN = "its positions are chosen by an index"


@rule(aten.embedding.default)
def embedding(call: Call, weight: Value, indices: Value, *_: Any) -> Value:
    """out[…, d] = weight[indices[…], d]."""
    call.fix(weight.dims[0], _CHOSEN)
    return Value([*indices.dims, weight.dims[1]], [*(False for _ in indices.dims), weight.is_zero(1)])


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(call: Call, weight: Value, indices: Value, offsets: Value, *_: Any) -> list[Value]:
    """out[b, d] = the sum (or mean, or maximum) of weight[i, d] over the indices i of bag b."""
    call.fix(weight.dims[0], _CHOSEN)
    first = Value([call.fixed(call.shape[0]), weight.dims[1]], [False, weight.is_zero(1)])
    rest = [Value([call.fixed(n) for n in shape]) for shape in call.outs[1:]]
    for value, shape in zip(rest, call.outs[1:], strict=True):
        if len(shape) == 2 and shape[1] == weight.dims[1].size:
            value.dims = (value.dims[0], weight.dims[1])
    return [first, *rest]


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    """out = x[i, :, j, …]: index tensors broadcast with each other; the other dimensions stay."""
    at = [i for i, entry in enumerate(indices) if entry is not None]
    for i in at:
        call.fix(x.dims[i], _CHOSEN)
    chosen = [entry for entry in indices if entry is not None]
    rank = max((len(entry.dims) for entry in chosen), default=0)
    kept = [i for i in range(len(x.dims)) if i not in at]
    together = at == list(range(at[0], at[-1] + 1)) if at else True
    lead = sum(1 for i in kept if at and i < at[0]) if together else 0
    shape = call.shape[lead : lead + rank]
    if len(call.shape) != len(kept) + rank or any(entry.zero and _is_mask(entry, x, i) for i, entry in ()):
        call.opaque(x, *chosen, reason=_CHOSEN)
        return Value([call.fixed(n) for n in call.shape])
    dims: list[Layout] = [x.dims[i] for i in kept]
    zero = [x.is_zero(i) for i in kept]
    inside = Call(call.tracer, call.op, [tuple(shape)])
    dims[lead:lead] = inside.broadcast(*chosen)
    zero[lead:lead] = [False] * rank
    if tuple(d.size for d in dims) != tuple(call.shape):  # a boolean mask: how many are true is data
        call.opaque(x, *chosen, reason=_CHOSEN)
        return Value([call.fixed(n) for n in call.shape])
    return Value(dims, zero)


def _is_mask(entry: Value, x: Value, i: int) -> bool:
    return False


@rule(aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default)
def index_put(call: Call, x: Value, indices: Sequence[Value | None], values: Value, *_: Any) -> Value:
    """x[i, :, j, …] = values."""
    at = [i for i, entry in enumerate(indices) if entry is not None]
    masked = any(entry is not None and len(entry.dims) > 1 for entry in indices)
    for i in at:
        call.fix(x.dims[i], _CHOSEN)
    tail = len(x.dims) - (at[-1] + 1 if at else 0)
    if masked or (at and at != list(range(at[0], at[-1] + 1))):
        if len(values.dims):
            call.opaque(x, values, reason=_CHOSEN)
    else:
        for back in range(1, min(tail, len(values.dims)) + 1):
            if values.dims[-back].size == x.dims[-back].size:
                unify(values.dims[-back], x.dims[-back])
        for dim in values.dims[: max(len(values.dims) - tail, 0)]:
            call.fix(dim, _CHOSEN)
    return Value(x.dims, False)


@rule(aten.index_select.default)
def index_select(call: Call, x: Value, dim: int, which: Value) -> Value:
    """out[…, i, …] = x[…, which[i], …]."""
    dim %= len(x.dims)
    call.fix(x.dims[dim], _CHOSEN)
    layout = which.dims[0] if which.dims else call.fixed(1)
    zero = [x.is_zero(i) and i != dim for i in range(len(x.dims))]
    return Value([*x.dims[:dim], layout, *x.dims[dim + 1 :]], zero)


@rule(aten.gather.default)
def gather(call: Call, x: Value, dim: int, which: Value, **_: Any) -> Value:
    """out[i, j] = x[i, which[i, j]] (for the last dimension)."""
    if not x.dims:
        return Value(())
    dim %= len(x.dims)
    call.fix(x.dims[dim], _CHOSEN)
    _align(call, x, dim, which)
    return Value(which.dims, [x.is_zero(i) and i != dim for i in range(len(x.dims))])


def _align(call: Call, x: Value, dim: int, which: Value) -> None:
    """Dimensions other than the chosen one are the same, or a leading part is taken."""
    for i, (a, b) in enumerate(zip(x.dims, which.dims, strict=True)):
        if i == dim:
            continue
        if a.size == b.size:
            unify(a, b)
        else:
            call.fix(a, "a leading part of it is taken")
            call.fix(b, "a leading part of it is taken")


@rule(aten.scatter, aten.scatter_add, aten.scatter_reduce)
def scatter(call: Call, x: Value, dim: int, which: Value, source: Any = None, *_: Any, **__: Any) -> Value:
    """out[i, which[i, j]] = source[i, j] (for the last dimension)."""
    dim %= len(x.dims)
    call.fix(x.dims[dim], _CHOSEN)
    _align(call, x, dim, which)
    if isinstance(source, Value) and source.dims:
        call.fix(source.dims[dim], _CHOSEN)
        _align(call, source, dim, which)
    return Value(x.dims, False)


@rule(aten.index_add.default, aten.index_copy.default, aten.index_reduce.default)
def index_add(call: Call, x: Value, dim: int, which: Value, source: Value, *_: Any, **__: Any) -> Value:
    """x[…, which[i], …] += source[…, i, …]."""
    dim %= len(x.dims)
    call.fix(x.dims[dim], _CHOSEN)
    for i, (a, b) in enumerate(zip(x.dims, source.dims, strict=True)):
        if i == dim:
            call.fix(b, _CHOSEN)
        else:
            unify(a, b)
    return Value(x.dims, [x.is_zero(i) and source.is_zero(i) and i != dim for i in range(len(x.dims))])


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(call: Call, x: Value, dim: int, which: Value, value: Any) -> Value:
    """x[…, which[i], …] = value."""
    call.fix(x.dims[dim], _CHOSEN)
    return Value(x.dims, False)


@rule(aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default)
def data_dependent(call: Call, x: Value, *others: Any, **_: Any) -> list[Value]:
    """How many elements come out depends on the data."""
    call.opaque(x, *(o for o in others if isinstance(o, Value)), reason="depends on the data")
    return [Value([call.fixed(n, "depends on the data") for n in shape]) for shape in call.outs]


@rule(aten.searchsorted.Tensor, aten.bucketize.Tensor)
def searchsorted(call: Call, a: Value, b: Value, *_: Any, **__: Any) -> Value:
    """Where elements belong in a sorted sequence."""
    call.opaque(a, b, reason="sorted")
    return Value([call.fixed(n) for n in call.shape])
