"""Ops that take dimensions apart into pieces, or put pieces together."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.axes import EMPTY, Concat, Layout, factor, fix, pieces, resolve, unify
from secateur.compat import aten
from secateur.ops.absent import absent_lines, mark
from secateur.ops.record import op
from secateur.ops.value import SPACE, Call, Value, layouts_of
from secateur.sizes.explain import Explainer
from secateur.sizes.size import plain


@op(aten.slice.Tensor)
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


@slice_.sizes("narrow", "narrow_copy")
def _(explain: Explainer, out: Any, input: Any, dim: int, start: Any, length: Any) -> None:
    if layouts_of(input):
        _bounds(explain, layouts_of(input)[dim], start, start + length)


@slice_.sizes("slice", "slice_copy")
def _(
    explain: Explainer, out: Any, input: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> None:
    if layouts_of(input):
        _bounds(explain, layouts_of(input)[dim], start, end, step)


def _bounds(explain: Explainer, layout: Layout, start: Any, stop: Any, step: Any = None) -> None:
    """The bounds of a slice; where data says what they are, nothing that they count may change."""
    if isinstance(start, Tensor) or isinstance(stop, Tensor):
        _by_data(explain, layout)
    elif start is not None or stop is not None:
        explain.expect_slice(layout, start, stop, step)


def _by_data(explain: Explainer, layout: Layout) -> None:
    fix(layout, f"its positions are chosen by data ({explain.where()})")


@slice_.sizes(Tensor.__getitem__, Tensor.__setitem__)
def _(explain: Explainer, out: Any, x: Any, key: Any, *_: Any) -> None:
    """x[a:b, i, …]: bounds and numbers are positions of the dimension that they cut."""
    layouts = layouts_of(x)
    keys = key if isinstance(key, tuple) else (key,)
    taken = sum(1 for k in keys if k is not None and k is not Ellipsis and not isinstance(k, bool))
    taken += sum(k.ndim - 1 for k in keys if isinstance(k, Tensor) and k.dtype == torch.bool)
    dim = 0
    for k in keys if layouts else ():
        if k is Ellipsis:
            dim += x.ndim - taken
        elif isinstance(k, slice):
            _bounds(explain, layouts[dim], k.start, k.stop, k.step)
            dim += 1
        elif k is not None and not isinstance(k, bool):
            if isinstance(k, int):
                explain.expect_position(layouts[dim], k)
            elif isinstance(k, Tensor) and k.ndim == 0:
                _by_data(explain, layouts[dim])
            dim += k.ndim if isinstance(k, Tensor) and k.dtype == torch.bool else 1


@op(aten.select.int, by_row=True)
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


@select.sizes("select", "select_copy")
def _(explain: Explainer, out: Any, input: Any, dim: int, index: Any) -> None:
    if isinstance(index, int) and layouts_of(input):
        explain.expect_position(layouts_of(input)[dim], index)
    elif layouts_of(input):
        _by_data(explain, layouts_of(input)[dim])


@op(aten.unbind.int, called="unbind", by_row=True)
def unbind(call: Call, x: Value, dim: int = 0) -> list[Value]:
    """Every position of a dimension by itself."""
    dim %= len(x.dims)
    if x.rows is not None:
        return [select(call, x, dim, i) for i in range(x.dims[dim].size)]
    call.fix(x.dims[dim], "its positions are taken apart one by one")
    rest = Value([*x.dims[:dim], *x.dims[dim + 1 :]], [*x.zero[:dim], *x.zero[dim + 1 :]])
    return [Value(rest.dims, rest.zero) for _ in range(x.dims[dim].size)]


@op(
    "split.Tensor split_with_sizes.default split_copy.Tensor split_with_sizes_copy.default unsafe_split.Tensor "
    "unsafe_split_with_sizes.default",
)
def split_(call: Call, x: Value, _sizes: Any, dim: int = 0) -> list[Value]:
    """A dimension cut into consecutive pieces."""
    dim %= len(x.dims)
    parts = pieces(x.dims[dim], [shape[dim] for shape in call.outs])
    return [Value([*x.dims[:dim], part, *x.dims[dim + 1 :]], x.zero) for part in parts]


def _parts(out: Sequence[Any], dim: int) -> list[Layout]:
    return [layouts_of(part)[dim] for part in out if layouts_of(part)]


_SPLITS = [f"{kind}split{end}" for kind in ("", "unsafe_") for end in ("", "_with_sizes", "_copy", "_with_sizes_copy")]


@split_.sizes(*_SPLITS)
def _(explain: Explainer, out: Any, input: Any, size: Any, dim: int = 0) -> None:
    """split(size) or split([sizes])."""
    parts = _parts(out, dim)
    if isinstance(size, tuple | list):
        explain.expect_all(size, parts)
    elif parts and plain(size) == parts[0].size:
        for part in parts[:-1]:
            explain.expect(size, part)
        if parts[-1].size == parts[0].size:
            explain.expect(size, parts[-1])
        else:
            explain.compare(parts[-1], "<=", size)


@split_.sizes("chunk", "unsafe_chunk")
def _(explain: Explainer, out: Any, input: Any, chunks: int, dim: int = 0) -> None:
    """All parts but the last are equally long."""
    explain.expect_equal_parts(_parts(out, dim))


@split_.sizes("tensor_split")
def tensor_split(explain: Explainer, out: Any, input: Any, given: Any, dim: int = 0) -> None:
    """tensor_split(n) makes equal parts, tensor_split([bounds]) cuts at positions."""
    if isinstance(given, tuple | list):
        for start, stop in itertools.pairwise([None, *given, None]) if layouts_of(input) else ():
            _bounds(explain, layouts_of(input)[dim], start, stop)
    elif isinstance(given, Tensor):
        for layout in layouts_of(input)[dim:][:1]:
            _by_data(explain, layout)
    else:
        explain.expect_equal_parts(_parts(out, dim))


@split_.sizes("hsplit")
def _(explain: Explainer, out: Any, input: Any, given: Any) -> None:
    """Along the second dimension (of a vector, the first)."""
    tensor_split(explain, out, input, given, min(1, input.ndim - 1))


@split_.sizes("vsplit")
def _(explain: Explainer, out: Any, input: Any, given: Any) -> None:
    tensor_split(explain, out, input, given, 0)


@split_.sizes("dsplit")
def _(explain: Explainer, out: Any, input: Any, given: Any) -> None:
    tensor_split(explain, out, input, given, 2)


@op(aten.cat.default, called="cat concat")
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


@op(aten.stack.default, called="stack")
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


@op(aten.constant_pad_nd.default, creates=True)
def constant_pad(call: Call, x: Value, pad: Sequence[int], value: float = 0) -> Value:
    """A constant before and after; negative widths crop."""
    dims = list(x.dims)
    zero = list(x.zero) if value == 0 else [False] * len(dims)
    for i in range(len(pad) // 2):
        at = len(dims) - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        cropped = pieces(dims[at], [max(-before, 0), dims[at].size - max(-before, 0) - max(-after, 0), max(-after, 0)])
        left = call.fresh(before) if before > 0 else cropped[0]
        right = call.fresh(after) if after > 0 else cropped[2]
        ends = (left if before > 0 else EMPTY, right if after > 0 else EMPTY)
        dims[at] = resolve(Concat((ends[0], cropped[1], ends[1])))
    return Value(dims, zero)


@constant_pad.sizes(torch.nn.functional.pad, "pad", torch.constant_pad_nd)
def _(explain: Explainer, out: Any, input: Any, pad: Any, *_: Any, **__: Any) -> None:
    """Each width is the size of a new piece; a negative one of a piece that goes."""
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        at = -1 - i
        for width, first in ((before, True), (after, False)):
            known = layouts_of(out) if plain(width) > 0 else layouts_of(input)
            if known and plain(width):
                n = abs(plain(width))
                rest = known[at].size - n
                piece = pieces(known[at], [n, rest])[0] if first else pieces(known[at], [rest, n])[1]
                explain.expect(width if plain(width) > 0 else -width, piece)


@constant_pad.absent
def _(op: Any, x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    """What is put around something absent is absent, too."""
    over = [x.ndim - 1 - i for i in range(len(pad) // 2)]
    return mark(op(x, pad, value), absent_lines(x, over))


@op(
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d",
    called="reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d",
)
def border_pad(call: Call, x: Value, pad: Sequence[int], **_: Any) -> Value:
    """Positions of the border again."""
    padded = len(pad) // 2
    keep = len(x.dims) - padded
    for dim in x.dims[keep:]:
        call.fix(dim, "its border is repeated")
    return Value([*x.dims[:keep], *(call.fixed(n, SPACE) for n in call.shape[keep:])], x.zero)
