"""Ops that pick positions by number."""

from collections.abc import Sequence
from typing import Any

from secateur.axes import Layout, unify
from secateur.compat import aten
from secateur.ops.absent import still_absent
from secateur.ops.record import op
from secateur.ops.value import Call, Value

LOOKED_UP = frozenset({aten.embedding.default, aten.index_select.default, aten._embedding_bag.default})
RANKED = frozenset({aten.topk.default, aten.sort.default, aten.argsort.default, aten.argmax.default})
_CHOSEN = "its positions are chosen by an index"


@op(aten.embedding.default, called="embedding")
def embedding(call: Call, weight: Value, indices: Value, *_: Any) -> Value:
    """out[…, d] = weight[indices[…], d]."""
    call.fix(weight.dims[0], _CHOSEN)
    return Value([*indices.dims, weight.dims[1]], [*(False for _ in indices.dims), weight.is_zero(1)])


@op(aten._embedding_bag.default, aten._embedding_bag_forward_only.default, called="embedding_bag")
def embedding_bag(call: Call, weight: Value, *others: Any) -> list[Value]:
    """out[b, d] = the sum (or mean, or maximum) of weight[i, d] over the indices i of bag b."""
    call.opaque(Value(weight.dims[:1]), *(v for v in others if isinstance(v, Value)), reason=_CHOSEN)
    first = Value([call.fixed(call.shape[0]), weight.dims[1]], [False, weight.is_zero(1)])
    rest = [Value([call.fixed(n) for n in shape], False) for shape in call.outs[1:]]
    for value, shape in zip(rest, call.outs[1:], strict=True):
        if len(shape) == 2 and shape[1] == weight.dims[1].size:
            value.dims = (value.dims[0], weight.dims[1])
    return [first, *rest]


@op(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    """out = x[i, :, j, …]: index tensors broadcast with each other; the other dimensions stay."""
    picked, lead, kept = _picked(call, x, indices)
    zero = [x.is_zero(i) for i in kept]
    dims: list[Layout | None] = [x.dims[i] for i in kept]
    dims[lead:lead] = picked
    zero[lead:lead] = [False] * len(picked)
    return Value([call.fixed(n, _CHOSEN) if d is None else d for d, n in zip(dims, call.shape, strict=True)], zero)


@op(
    "index_put.default index_put_.default _unsafe_index_put.default",
    called="index_put index_put_",
)
def index_put(call: Call, x: Value, indices: Sequence[Value | None], values: Value, *_: Any) -> Value:
    """x[i, :, j, …] = values, which broadcast to what the index picks."""
    call.opaque(*(entry for entry in indices if entry is not None), reason=_CHOSEN)
    picked, lead, kept = _picked(call, x, indices)
    dims: list[Layout | None] = [x.dims[i] for i in kept]
    dims[lead:lead] = picked
    for theirs, mine in zip(reversed(dims), reversed(values.dims), strict=False):
        if theirs is not None and theirs.size == mine.size:
            unify(theirs, mine)
        else:
            call.fix(mine, _CHOSEN)
    return Value(x.dims, False)


index_put.absent(still_absent)


def _picked(call: Call, x: Value, indices: Sequence[Value | None]) -> tuple[list[Layout | None], int, list[int]]:
    """What index tensors make of x: their own dimensions (None: how many is data), where these go, what is kept."""
    used: list[int] = []
    at = 0
    for entry in indices:
        width = len(entry.dims) if entry is not None and entry.boolean else 1
        used += [] if entry is None else range(at, at + width)
        at += width
    for i in used:
        call.fix(x.dims[i], _CHOSEN)
    chosen = [entry for entry in indices if entry is not None]
    masks = [entry for entry in chosen if entry.boolean]
    call.opaque(*masks, reason=_CHOSEN)
    rank = max((1 if entry.boolean else len(entry.dims) for entry in chosen), default=0)
    picked: list[Layout | None] = []
    for back in range(-rank, 0):
        along = [v.dims[back] for v in chosen if not v.boolean and len(v.dims) >= -back]
        size = next((d.size for d in along if d.size != 1), 1)  # also where that is none
        same = [d for d in along if d.size == size]
        for other in same[1:]:
            unify(same[0], other)
        picked.append(same[0] if same and not (masks and back == -1) else None)
    kept = [i for i in range(len(x.dims)) if i not in used]
    together = bool(used) and used == list(range(used[0], used[-1] + 1))
    return picked, used[0] if together else 0, kept


@op(aten.index_select.default, called="index_select", by_row=True)
def index_select(call: Call, x: Value, dim: int, which: Value) -> Value:
    """out[…, i, …] = x[…, which[i], …]."""
    dim %= len(x.dims)
    if not 0 < dim < len(x.dims) - 1:
        x.tie_rows()
    call.fix(x.dims[dim], _CHOSEN)
    layout = which.dims[0] if which.dims else call.fixed(1)
    zero = [x.is_zero(i) and i != dim for i in range(len(x.dims))]
    picked = Value([*x.dims[:dim], layout, *x.dims[dim + 1 :]], zero)
    picked.rows = x.rows
    return picked


@op(aten.gather.default, called="gather take_along_dim")
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


@op(
    "scatter scatter_add scatter_reduce",
    called="scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_",
)
def scatter(call: Call, x: Value, dim: int, which: Value, source: Any = None, *_: Any, **__: Any) -> Value:
    """out[i, which[i, j]] = source[i, j] (for the last dimension)."""
    dim %= len(x.dims)
    call.fix(x.dims[dim], _CHOSEN)
    call.fix(which.dims[dim], _CHOSEN)
    _align(call, x, dim, which)
    if isinstance(source, Value) and source.dims:
        call.fix(source.dims[dim], _CHOSEN)
        _align(call, source, dim, which)
    return Value(x.dims, False)


scatter.absent(still_absent)


@op(
    "index_add.default index_copy.default index_reduce.default",
    called="index_add index_add_ index_copy index_copy_ index_reduce index_reduce_",
)
def index_add(call: Call, x: Value, dim: int, which: Value, source: Value, *_: Any, **__: Any) -> Value:
    """x[…, which[i], …] += source[…, i, …]."""
    dim %= len(x.dims)
    call.opaque(Value([x.dims[dim]]), which, reason=_CHOSEN)
    for i, (a, b) in enumerate(zip(x.dims, source.dims, strict=True)):
        if i == dim:
            call.fix(b, _CHOSEN)
        else:
            unify(a, b)
    return Value(x.dims, [x.is_zero(i) and source.is_zero(i) and i != dim for i in range(len(x.dims))])


@op(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, called="index_fill index_fill_")
def index_fill(call: Call, x: Value, dim: int, which: Value, value: Any) -> Value:
    """x[…, which[i], …] = value."""
    call.opaque(Value([x.dims[dim]]), which, reason=_CHOSEN)
    return Value(x.dims, False)


index_fill.absent(still_absent)


@op(aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default)
def data_dependent(call: Call, x: Value, *others: Any, **_: Any) -> list[Value]:
    """How many elements come out depends on the data."""
    call.opaque(x, *(o for o in others if isinstance(o, Value)), reason="depends on the data")
    return [Value([call.fixed(n, "depends on the data") for n in shape]) for shape in call.outs]


@op(aten.searchsorted.Tensor, aten.bucketize.Tensor)
def searchsorted(call: Call, a: Value, b: Value, *_: Any, **__: Any) -> Value:
    """Where elements belong in a sorted sequence."""
    call.opaque(a, b, reason="sorted")
    return Value([call.fixed(n) for n in call.shape])
