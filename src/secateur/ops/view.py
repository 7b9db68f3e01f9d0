"""Ops that move, merge, split or repeat dimensions and compute nothing."""

import math
from collections.abc import Sequence
from typing import Any

from secateur.axes import UNIT, Atom, Layout, Product, constant, factor, resolve, unify
from secateur.compat import aten
from secateur.ops.absent import still_absent
from secateur.ops.record import named, op
from secateur.ops.value import Call, Value, layouts_of
from secateur.sizes.explain import Explainer
from secateur.sizes.size import plain

# Ops after which elements lie in the same order.
KEEP_ORDER = {
    *named("view.default _unsafe_view.default clone.default alias.default detach.default contiguous.default"),
}
# Views of one tensor whose shape a kernel of torch's tells without values.
VIEWS = {
    *named("view.default _unsafe_view.default _reshape_alias.default permute.default transpose.int t.default"),
    *named("expand.default select.int slice.Tensor unsqueeze.default squeeze.dim detach.default alias.default"),
    *named("unbind.int split.Tensor split_with_sizes.default"),
}


def moves_nothing(op: Any) -> bool:
    """Whether an op gives another view of memory; torch does not call `_unsafe_view` one."""
    return bool(op.is_view) or op is aten._unsafe_view.default


@op(
    "view.default _unsafe_view.default _reshape_alias.default reshape.default",
    called="flatten ravel",
)
def view(call: Call, x: Value, *_: Any) -> Value:
    """The same elements in row-major order under another shape."""
    return reshape(call, x, call.shape)


@view.sizes("view", "reshape", "_unsafe_view", "_reshape_alias", "view_copy")
def shape_given(explain: Explainer, out: Any, input: Any, size: Any, *_: Any, **__: Any) -> None:
    """The sizes of all dimensions; -1 follows from the others."""
    if isinstance(size, tuple | list):  # `view` also takes a dtype
        explain.expect_all(size, layouts_of(out))


@view.sizes("view_as", "reshape_as")
def as_other(explain: Explainer, out: Any, input: Any, other: Any) -> None:
    """As many positions as the other has."""
    for mine, theirs in zip(layouts_of(out), layouts_of(other), strict=False):
        explain.expect_same(mine, theirs)


def all_alike(explain: Explainer, out: Any, *_: Any, **__: Any) -> None:
    """Tensors that come out with one and the same shape."""
    for other in out[1:]:
        as_other(explain, out[0], None, other)


@view.sizes("unflatten")
def _(explain: Explainer, out: Any, input: Any, dim: int, sizes: Any) -> None:
    at = dim % input.ndim
    explain.expect_all(sizes, layouts_of(out)[at : at + len(sizes)])


def reshape(call: Call, x: Value, shape: Sequence[int]) -> Value:
    dims: list[Layout] = []
    zero: list[bool] = []
    for ins, outs in _groups(x.shape, shape):
        clean = all(x.is_zero(i) or constant(resolve(x.dims[i])) for i in ins)
        if len(ins) == 1 and len(outs) == 1:
            dims.append(x.dims[ins[0]])
        elif math.prod(x.shape[i] for i in ins) != math.prod(outs) or 0 in outs:
            call.opaque(Value([x.dims[i] for i in ins]), reason="nothing is in it")
            dims += [call.fixed(n, "nothing is in it") for n in outs]
        else:
            fresh = [Atom(n) for n in outs]
            unify(Product(tuple(x.dims[i] for i in ins)), Product(tuple(fresh)))
            dims += [resolve(atom) for atom in fresh]
        zero += [clean] * len(outs)
    return Value(dims, zero)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions with equal products: (indices before, sizes after), each run as short as possible.

    Where there are no elements, what is alike at either end stays, and the rest is one run.
    """
    if 0 in before or 0 in after:
        return _empty_groups(before, after)
    runs = []
    i = j = 0
    while i < len(before) or j < len(after):
        ins: list[int] = []
        outs: list[int] = []
        left = right = 1
        while True:
            if left <= right and i < len(before) and (left < right or not ins):
                ins.append(i)
                left *= before[i]
                i += 1
            elif j < len(after) and (right < left or not outs):
                outs.append(after[j])
                right *= after[j]
                j += 1
            else:
                break
        runs.append((ins, outs))
    return runs


def _empty_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    most = min(len(before), len(after))
    first = next((i for i in range(most) if before[i] != after[i]), most)
    last = next((i for i in range(most - first) if before[-1 - i] != after[-1 - i]), most - first)
    end = len(before) - last
    kept = [*range(first), *range(end, len(before))]
    ends = [([i], [before[i]]) for i in kept]
    rest = list(range(first, end)), list(after[first : len(after) - last])
    return [*ends[:first], *([rest] if any(rest) else []), *ends[first:]]


@op(aten.permute.default, called="permute movedim")
def permute(call: Call, x: Value, order: Sequence[int]) -> Value:
    """out dimension i is x's dimension order[i]."""
    return Value([x.dims[i] for i in order], [x.zero[i] for i in order])


@op(aten.transpose.int, aten.swapaxes.default, called="transpose swapaxes swapdims")
def transpose(call: Call, x: Value, a: int, b: int) -> Value:
    """Two dimensions change places."""
    order = list(range(len(x.dims)))
    order[a], order[b] = order[b], order[a]
    return permute(call, x, order)


@op(aten.numpy_T.default)
def numpy_t(call: Call, x: Value) -> Value:
    """All dimensions in reverse."""
    return permute(call, x, range(len(x.dims))[::-1])


@op(aten.t.default, aten.adjoint.default, aten.mT.default)
def t(call: Call, x: Value) -> Value:
    """The last two dimensions change places."""
    return transpose(call, x, -1, -2) if len(x.dims) > 1 else Value(x.dims, x.zero)


@op(aten.unsqueeze.default, called="unsqueeze")
def unsqueeze(call: Call, x: Value, dim: int) -> Value:
    """A new dimension of one position."""
    at = dim % (len(x.dims) + 1)
    return Value([*x.dims[:at], UNIT, *x.dims[at:]], [*x.zero[:at], True, *x.zero[at:]])


@op(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, called="squeeze")
def squeeze(call: Call, x: Value, dim: Any = None) -> Value:
    """Dimensions of one position go; the others must not come down to one."""
    rank = len(x.dims)
    asked = range(rank) if dim is None else [d % rank for d in (dim if isinstance(dim, list) else [dim]) if rank]
    keep = [i for i in range(rank) if not (i in asked and x.dims[i].size == 1)]
    for i in keep:
        if i in asked:
            call.sizes.compare(x.dims[i], ">", 1)
    return Value([x.dims[i] for i in keep], [x.zero[i] for i in keep])


@op(aten.expand.default, creates=True)
def expand(call: Call, x: Value, size: Sequence[int], **_: Any) -> Value:
    """Dimensions of one position are repeated; a new axis, because every position of it is alike."""
    lead = len(call.shape) - len(x.dims)
    dims: list[Layout] = []
    zero = []
    for i, n in enumerate(call.shape):
        kept = i >= lead and x.dims[i - lead].size == n
        dims.append(x.dims[i - lead] if kept else call.fresh(n))
        zero.append(x.is_zero(i - lead) if kept else False)
    return Value(dims, zero)


expand.sizes("expand", "broadcast_to", "expand_copy")(shape_given)
expand.sizes("expand_as")(as_other)
expand.sizes("broadcast_tensors", "meshgrid")(all_alike)


@op(aten.repeat.default, creates=True)
def repeat(call: Call, x: Value, repeats: Sequence[int]) -> Value:
    """Each dimension, `repeats` times over."""
    lead = len(repeats) - len(x.dims)
    dims: list[Layout] = []
    zero = []
    axes = [call.fresh(n) for n in repeats]
    for i, n in enumerate(repeats):
        inner = x.dims[i - lead] if i >= lead else UNIT
        dims.append(inner if n == 1 else Product((axes[i], inner)))
        zero.append(n == 1 and i >= lead and x.is_zero(i - lead))
    return Value(dims, zero)


@repeat.sizes("repeat", "tile")
def _(explain: Explainer, out: Any, input: Any, counts: Any) -> None:
    """Each count is the size of a new axis, in front of what it repeats."""
    for layout, count in zip(reversed(layouts_of(out)), reversed(counts), strict=False):
        if plain(count):
            explain.expect(count, factor(layout, plain(count))[0])


@op(aten.repeat_interleave.self_int, creates=True)
def repeat_interleave(call: Call, x: Value, repeats: int, dim: int | None = None, **_: Any) -> Value:
    """Each position of a dimension, `repeats` times in a row."""
    if dim is None:
        x = reshape(call, x, [math.prod(x.shape)])
        dim = 0
    at = dim % len(x.dims)
    dims = list(x.dims)
    dims[at] = Product((dims[at], call.fresh(repeats)))
    return Value(dims, [*x.zero[:at], False, *x.zero[at + 1 :]])


@repeat_interleave.sizes("repeat_interleave")
def _(
    explain: Explainer, out: Any, input: Any, repeats: Any = None, dim: int | None = None, *, output_size: Any = None
) -> None:
    """The count is the size of the one new axis, behind what it repeats."""
    if isinstance(repeats, int) and plain(repeats) and layouts_of(out):
        layout = layouts_of(out)[0 if dim is None else dim]
        explain.expect(repeats, factor(layout, layout.size // plain(repeats))[1])
        explain.expect(output_size, layout)


@op(aten.flip.default, called="flip")
def flip(call: Call, x: Value, moved: Sequence[int]) -> Value:
    """Positions of some dimensions in reverse."""
    for dim in moved:
        call.fix(x.dims[dim], "its positions are reordered")
    return Value(x.dims, x.zero)


@op(aten.rot90.default, called="rot90")
def rot90(call: Call, x: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    """A plane of two dimensions, turned by quarters."""
    turned = flip(call, x, dims)
    order = list(range(len(x.dims)))
    if k % 2:
        a, b = (dim % len(order) for dim in dims)
        order[a], order[b] = b, a
    return Value([turned.dims[i] for i in order], [turned.zero[i] for i in order])


@op(aten.roll.default, called="roll")
def roll(call: Call, x: Value, shifts: Any, moved: Sequence[int] = ()) -> Value:
    """Positions of some dimensions, or of all in a row, moved on."""
    return flip(call, x, moved or range(len(x.dims)))


@op(aten.unfold.default, called="unfold")
def unfold(call: Call, x: Value, dim: int, size: int, step: int) -> Value:
    """Windows of a dimension, as a new last dimension."""
    if x.dims:
        dim %= len(x.dims)
        call.fix(x.dims[dim], "sliding windows")
    dims = list(x.dims)
    dims[dim] = call.fixed(call.shape[dim], "sliding windows")
    return Value([*dims, call.fixed(size, "sliding windows")], [*x.zero, True])


@op(aten.as_strided.default, aten.as_strided_.default)
def as_strided(call: Call, x: Value, size: Any, stride: Any, *_: Any) -> Value:
    """The same memory read otherwise; only the same shape in row-major order is understood."""
    dense = [math.prod(n for n in size[i + 1 :]) for i in range(len(size))]
    if tuple(size) == x.shape and all(n == 1 or a == b for n, a, b in zip(size, stride, dense, strict=True)):
        return Value(x.dims, x.zero)
    call.opaque(x, reason="reads memory by strides")
    return Value([call.fixed(n) for n in call.shape])


@as_strided.sizes("as_strided", "as_strided_")
def _(explain: Explainer, out: Any, input: Any, size: Any, *_: Any, **__: Any) -> None:
    explain.expect_all(size, layouts_of(out))


@op(aten.diagonal.default, called="diagonal")
def diagonal(call: Call, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """out[…, i] = x[…, i, i]."""
    dim1, dim2 = dim1 % len(x.dims), dim2 % len(x.dims)
    if offset == 0 and x.dims[dim1].size == x.dims[dim2].size:
        unify(x.dims[dim1], x.dims[dim2])
        last: Layout = x.dims[dim1]
    else:
        call.fix(x.dims[dim1], "a diagonal")
        call.fix(x.dims[dim2], "a diagonal")
        last = call.fixed(call.shape[-1], "a diagonal")
    rest = [i for i in range(len(x.dims)) if i not in (dim1, dim2)]
    return Value([*(x.dims[i] for i in rest), last], [*(x.zero[i] for i in rest), x.zero[dim1]])


@op(aten.tril.default, aten.triu.default, called="tril triu")
def triangle(call: Call, x: Value, *_: Any) -> Value:
    """Zero above or below a diagonal: order and size of the last two dimensions matter."""
    call.fix(x.dims[-1], "a triangle of it is kept")
    call.fix(x.dims[-2], "a triangle of it is kept")
    return Value(x.dims, x.zero)


triangle.absent(still_absent)
