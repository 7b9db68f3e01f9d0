"""Ops that move, merge, split or repeat dimensions and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from secateur.axes import EMPTY, UNIT, Atom, Concat, Layout, Product, constant, factor, pieces, resolve, unify
from secateur.trace.registry import rule
from secateur.trace.sizes import Dim, Lit
from secateur.trace.value import Call, Value

aten = torch.ops.aten


@rule(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.reshape.default)
def view(call: Call, x: Value, *_: Any) -> Value:
    """The same elements in row-major order under another shape."""
    return reshape(call, x, call.shape)


def reshape(call: Call, x: Value, shape: Sequence[int]) -> Value:
    dims: list[Layout] = []
    zero: list[bool] = []
    for ins, outs in _groups(x.shape, shape):
        clean = all(x.is_zero(i) or constant(resolve(x.dims[i])) for i in ins)
        if len(ins) == 1 and len(outs) == 1:
            dims.append(x.dims[ins[0]])
        elif 0 in x.shape:
            dims += [call.fixed(n) for n in outs]
        else:
            fresh = [Atom(n) for n in outs]
            unify(Product(tuple(x.dims[i] for i in ins)), Product(tuple(fresh)))
            dims += [resolve(atom) for atom in fresh]
        zero += [clean] * len(outs)
    return Value(dims, zero)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions with equal products: (indices before, sizes after), each run as short as possible."""
    if 0 in before or 0 in after:
        return [(list(range(len(before))), list(after))]
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


@rule(aten.permute.default)
def permute(call: Call, x: Value, order: Sequence[int]) -> Value:
    """out dimension i is x's dimension order[i]."""
    return Value([x.dims[i] for i in order], [x.zero[i] for i in order])


@rule(aten.transpose.int, aten.swapaxes.default)
def transpose(call: Call, x: Value, a: int, b: int) -> Value:
    """Two dimensions change places."""
    order = list(range(len(x.dims)))
    order[a], order[b] = order[b], order[a]
    return permute(call, x, order)


@rule(aten.numpy_T.default)
def numpy_t(call: Call, x: Value) -> Value:
    """All dimensions in reverse."""
    return permute(call, x, range(len(x.dims))[::-1])


@rule(aten.t.default, aten.adjoint.default, aten.mT.default)
def t(call: Call, x: Value) -> Value:
    """The last two dimensions change places."""
    return transpose(call, x, -1, -2) if len(x.dims) > 1 else Value(x.dims, x.zero)


@rule(aten.unsqueeze.default)
def unsqueeze(call: Call, x: Value, dim: int) -> Value:
    """A new dimension of one position."""
    at = dim % (len(x.dims) + 1)
    return Value([*x.dims[:at], UNIT, *x.dims[at:]], [*x.zero[:at], True, *x.zero[at:]])


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(call: Call, x: Value, dim: Any = None) -> Value:
    """Dimensions of one position go; the others must not come down to one."""
    rank = len(x.dims)
    asked = range(rank) if dim is None else [d % rank for d in (dim if isinstance(dim, list) else [dim]) if rank]
    keep = [i for i in range(rank) if not (i in asked and x.dims[i].size == 1)]
    for i in keep:
        if i in asked and not constant(resolve(x.dims[i])):
            call.tracer.on_comparison(">", Dim(x.dims[i]), Lit(1), True)
    return Value([x.dims[i] for i in keep], [x.zero[i] for i in keep])


@rule(aten.expand.default, creates=True)
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


@rule(aten.repeat.default, creates=True)
def repeat(call: Call, x: Value, repeats: Sequence[int]) -> Value:
    """Each dimension, `repeats` times over."""
    lead = len(repeats) - len(x.dims)
    dims: list[Layout] = []
    zero = []
    axes = [call.fresh(n) for n in repeats]
    call.tracer.repeats = tuple(axes)
    for i, n in enumerate(repeats):
        inner = x.dims[i - lead] if i >= lead else UNIT
        dims.append(inner if n == 1 else Product((axes[i], inner)))
        zero.append(n == 1 and i >= lead and x.is_zero(i - lead))
    return Value(dims, zero)


@rule(aten.repeat_interleave.self_int, creates=True)
def repeat_interleave(call: Call, x: Value, repeats: int, dim: int | None = None, **_: Any) -> Value:
    """Each position of a dimension, `repeats` times in a row."""
    if dim is None:
        x = reshape(call, x, [math.prod(x.shape)])
        dim = 0
    at = dim % len(x.dims)
    dims = list(x.dims)
    dims[at] = Product((dims[at], call.fresh(repeats)))
    return Value(dims, [*x.zero[:at], False, *x.zero[at + 1 :]])


@rule(aten.slice.Tensor)
def slice_(
    call: Call, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    """Positions start, start + step, … of a dimension."""
    dim %= len(x.dims)
    layout, n = x.dims[dim], x.dims[dim].size
    begin = min(max(start + n if start is not None and start < 0 else start or 0, 0), n)
    stop = n if end is None else min(max(end + n if end < 0 else end, begin), n)
    taken: Layout
    if step == 1:
        taken = pieces(layout, [begin, stop - begin, n - stop])[1]
    elif n % step == 0 and begin < step and call.shape[dim] == n // step:
        taken, phase = factor(layout, n // step)
        call.fix(phase, f"every {step}th position is taken")
    else:
        call.fix(layout, f"every {step}th position is taken")
        taken = call.fixed(call.shape[dim], f"every {step}th position is taken")
    return Value([*x.dims[:dim], taken, *x.dims[dim + 1 :]], x.zero)


@rule(aten.select.int)
def select(call: Call, x: Value, dim: int, position: int) -> Value:
    """One position of a dimension."""
    dim %= len(x.dims)
    position %= x.dims[dim].size
    if x.rows is not None:
        if dim == 0:
            return Value([*x.dims[1:-1], x.rows[position]], x.zero[1:])
        x.tie_rows()
    pieces(x.dims[dim], [position, 1, x.dims[dim].size - position - 1])
    return Value([*x.dims[:dim], *x.dims[dim + 1 :]], [*x.zero[:dim], *x.zero[dim + 1 :]])


@rule(aten.unbind.int)
def unbind(call: Call, x: Value, dim: int = 0) -> list[Value]:
    """Every position of a dimension by itself."""
    dim %= len(x.dims)
    if x.rows is not None:
        return [select(call, x, dim, i) for i in range(x.dims[dim].size)]
    call.fix(x.dims[dim], "its positions are taken apart one by one")
    rest = Value([*x.dims[:dim], *x.dims[dim + 1 :]], [*x.zero[:dim], *x.zero[dim + 1 :]])
    return [Value(rest.dims, rest.zero) for _ in range(x.dims[dim].size)]


@rule(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split_copy.Tensor,
    aten.split_with_sizes_copy.default,
)
def split_(call: Call, x: Value, _sizes: Any, dim: int = 0) -> list[Value]:
    """A dimension cut into consecutive pieces."""
    dim %= len(x.dims)
    parts = pieces(x.dims[dim], [shape[dim] for shape in call.outs])
    return [Value([*x.dims[:dim], part, *x.dims[dim + 1 :]], x.zero) for part in parts]


@rule(aten.cat.default)
def cat(call: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Tensors one after the other along a dimension."""
    dim %= len(call.shape)
    tensors = [x for x in tensors if len(x.dims) == len(call.shape)]
    dims: list[Layout] = []
    for i in range(len(call.shape)):
        if i == dim:
            dims.append(resolve(Concat(tuple(x.dims[i] for x in tensors))))
        else:
            for x in tensors[1:]:
                unify(tensors[0].dims[i], x.dims[i])
            dims.append(tensors[0].dims[i])
    return Value(dims, [all(x.is_zero(i) for x in tensors) for i in range(len(dims))])


@rule(aten.stack.default)
def stack(call: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Tensors side by side along a new dimension."""
    dim %= len(call.shape)
    for x in tensors[1:]:
        for a, b in zip(tensors[0].dims, x.dims, strict=True):
            unify(a, b)
    zero = [all(x.is_zero(i) for x in tensors) for i in range(len(tensors[0].dims))]
    new = call.fixed(len(tensors), "tensors stacked one by one")
    first = tensors[0].dims
    return Value([*first[:dim], new, *first[dim:]], [*zero[:dim], True, *zero[dim:]])


@rule(aten.flip.default, aten.roll.default)
def reorder(call: Call, x: Value, *args: Any) -> Value:
    """Positions of some dimensions in another order."""
    moved = args[0] if call.name == "flip" else args[1] if len(args) > 1 and args[1] else range(len(x.dims))
    for dim in moved:
        call.fix(x.dims[dim], "its positions are reordered")
    return Value(x.dims, x.zero)


@rule(aten.unfold.default)
def unfold(call: Call, x: Value, dim: int, size: int, step: int) -> Value:
    """Windows of a dimension, as a new last dimension."""
    if x.dims:
        dim %= len(x.dims)
        call.fix(x.dims[dim], "sliding windows")
    dims = list(x.dims)
    dims[dim] = call.fixed(call.shape[dim], "sliding windows")
    return Value([*dims, call.fixed(size, "sliding windows")], [*x.zero, True])


@rule(aten.as_strided.default, aten.as_strided_.default)
def as_strided(call: Call, x: Value, size: Any, stride: Any, *_: Any) -> Value:
    """The same memory read otherwise; only the same shape in row-major order is understood."""
    dense = [math.prod(n for n in size[i + 1 :]) for i in range(len(size))]
    if tuple(size) == x.shape and all(n == 1 or a == b for n, a, b in zip(size, stride, dense, strict=True)):
        return Value(x.dims, x.zero)
    call.opaque(x, reason="reads memory by strides")
    return Value([call.fixed(n) for n in call.shape])


@rule(aten.diagonal.default)
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


@rule(aten.tril.default, aten.triu.default)
def triangle(call: Call, x: Value, *_: Any) -> Value:
    """Zero above or below a diagonal: order and size of the last two dimensions matter."""
    call.fix(x.dims[-1], "a triangle of it is kept")
    call.fix(x.dims[-2], "a triangle of it is kept")
    return Value(x.dims, x.zero)


@rule(aten.constant_pad_nd.default, creates=True)
def constant_pad(call: Call, x: Value, pad: Sequence[int], value: float = 0) -> Value:
    """A constant before and after; negative widths crop."""
    dims = list(x.dims)
    zero = list(x.zero) if value == 0 else [False] * len(dims)
    widths: list[Layout | None] = []
    for i in range(len(pad) // 2):
        at = len(dims) - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        cropped = pieces(dims[at], [max(-before, 0), dims[at].size - max(-before, 0) - max(-after, 0), max(-after, 0)])
        left = call.fresh(before) if before > 0 else cropped[0]
        right = call.fresh(after) if after > 0 else cropped[2]
        widths += [left, right]
        ends = (left if before > 0 else EMPTY, right if after > 0 else EMPTY)
        dims[at] = resolve(Concat((ends[0], cropped[1], ends[1])))
    call.tracer.pads = tuple(widths)
    return Value(dims, zero)


@rule(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d, aten.replication_pad1d)
@rule(aten.replication_pad2d, aten.replication_pad3d)
def border_pad(call: Call, x: Value, pad: Sequence[int], **_: Any) -> Value:
    """Positions of the border again."""
    padded = len(pad) // 2
    keep = len(x.dims) - padded
    for dim in x.dims[keep:]:
        call.fix(dim, "its border is repeated")
    return Value([*x.dims[:keep], *(call.fixed(n, "spatial") for n in call.shape[keep:])], x.zero)


@rule(aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
def unsafe_split(call: Call, x: Value, sizes: Any, dim: int = 0) -> list[Value]:
    """A dimension cut into consecutive pieces."""
    return split_(call, x, sizes, dim)
