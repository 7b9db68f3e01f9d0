"""Which arguments of torch functions are sizes, and of what.

The rules say what an op does to layouts; a signature here says that an argument of the call that led there must be
the size of one of them, now and after any cut. Ints that remember where they came from arrive at this level; below
it they are plain.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.axes import Layout
from secateur.trace.registry import sizes
from secateur.trace.sizes import plain
from secateur.trace.tracer import Tracer


def _both(*names: str) -> list[Any]:
    """The functions of these names, as methods and as functions."""
    found: dict[Any, None] = {}
    for name in names:
        for home in (Tensor, torch, torch._C.TensorBase, torch._C._VariableFunctions, torch._C._nn):
            if hasattr(home, name):
                found.setdefault(getattr(home, name))
    return list(found)


def _dims(tracer: Tracer, tensor: Any) -> tuple[Layout, ...]:
    value = tracer.known(tensor)
    return value.dims if value is not None else ()


def _listed(args: Sequence[Any]) -> Sequence[Any]:
    """Sizes given one by one, or as one sequence."""
    return args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args


def _expect_all(tracer: Tracer, given: Sequence[Any], layouts: Sequence[Layout]) -> None:
    for size, layout in zip(given, layouts, strict=False):
        tracer.expect(size, layout)


@sizes(*_both("view", "reshape", "_unsafe_view", "expand", "broadcast_to", "expand_copy", "view_copy"))
def shape_given(tracer: Tracer, out: Any, /, x: Any, *args: Any, **kwargs: Any) -> None:
    """view(sizes), reshape(sizes), expand(sizes)."""
    given = _listed(args or tuple(kwargs.get(k) for k in ("shape", "size") if k in kwargs))
    if given and isinstance(given[0], int):
        _expect_all(tracer, given, _dims(tracer, out))


@sizes(*_both("expand_as", "view_as", "reshape_as"))
def shape_of_other(tracer: Tracer, out: Any, /, x: Any, other: Any) -> None:
    """expand_as(other), view_as(other): as many positions as the other has."""
    for mine, theirs in zip(_dims(tracer, out), _dims(tracer, other), strict=False):
        tracer.expect_same(mine, theirs)


@sizes(*_both("broadcast_tensors", "meshgrid"))
def broadcast(tracer: Tracer, out: Any, /, *_: Any, **__: Any) -> None:
    """Tensors that come out with one and the same shape."""
    for other in out[1:]:
        shape_of_other(tracer, out[0], None, other)


@sizes(*_both("unflatten"))
def unflatten(tracer: Tracer, out: Any, /, x: Any, dim: int, sizes: Any) -> None:
    """unflatten(dim, sizes)."""
    at = dim % x.ndim
    _expect_all(tracer, sizes, _dims(tracer, out)[at : at + len(sizes)])


@sizes(
    *_both("zeros", "ones", "empty", "rand", "randn", "new_zeros", "new_ones", "new_empty"),
)
def created(tracer: Tracer, out: Any, /, *args: Any, **kwargs: Any) -> None:
    """zeros(sizes), x.new_zeros(sizes)."""
    given = args[1:] if args and isinstance(args[0], Tensor) else args
    _expect_all(tracer, _listed(given or (kwargs.get("size", ()),)), _dims(tracer, out))


@sizes(*_both("full", "new_full"))
def full(tracer: Tracer, out: Any, /, *args: Any, **kwargs: Any) -> None:
    """full(sizes, value)."""
    given = args[1:] if args and isinstance(args[0], Tensor) else args
    _expect_all(tracer, given[0] if given else kwargs.get("size", ()), _dims(tracer, out))


@sizes(*_both("arange", "linspace", "eye", "randperm", "tril_indices", "triu_indices"))
def counted(tracer: Tracer, out: Any, /, *args: Any, **kwargs: Any) -> None:
    """Contents depend on positions: what these numbers count must stay."""
    for number in (*args, *kwargs.values()):
        tracer.pin(number, "numbers positions one by one")


@sizes(*_both("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"))
def split(tracer: Tracer, out: Any, /, x: Any, size: Any = None, dim: int = 0, **kwargs: Any) -> None:
    """split(size) or split([sizes])."""
    size = kwargs.get("split_size_or_sections", kwargs.get("split_size", kwargs.get("split_sizes", size)))
    parts = [_dims(tracer, part)[dim] for part in out if _dims(tracer, part)]
    if isinstance(size, tuple | list):
        _expect_all(tracer, size, parts)
    elif parts and plain(size) == parts[0].size:
        for part in parts[:-1]:
            tracer.expect(size, part)
        if parts[-1].size == parts[0].size:
            tracer.expect(size, parts[-1])
        else:
            tracer.compare(parts[-1], "<=", size, True)


@sizes(*_both("chunk", "unsafe_chunk"))
def chunk(tracer: Tracer, out: Any, /, x: Any, *args: Any, **kwargs: Any) -> None:
    """chunk(n) makes all parts but the last equally long."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    _equal_parts(tracer, [_dims(tracer, part)[dim] for part in out if _dims(tracer, part)])


def _equal_parts(tracer: Tracer, parts: Sequence[Layout]) -> None:
    """Parts of equal length keep equally many positions; where one is longer, how many must not change."""
    if len({part.size for part in parts}) == 1:
        for part in parts[1:]:
            tracer.equal_counts(parts[0], part, f"equal parts are made ({tracer.where()})")
    else:
        for part in parts:
            tracer.expect(part.size, part)


@sizes(*_both("tensor_split"))
def tensor_split(tracer: Tracer, out: Any, /, x: Any, given: Any = None, dim: int = 0, **kwargs: Any) -> None:
    """tensor_split(n) makes equal parts, tensor_split([bounds]) cuts at positions."""
    given = given if given is not None else next(iter(kwargs.values()))
    if isinstance(given, tuple | list):
        bounds = [None, *given, None]
        for start, stop in itertools.pairwise(bounds):
            tracer.expect_slice(x, dim % x.ndim, start, stop)
    else:
        _equal_parts(tracer, [_dims(tracer, part)[dim] for part in out if _dims(tracer, part)])


@sizes(torch.hsplit, Tensor.hsplit)
def hsplit(tracer: Tracer, out: Any, /, x: Any, given: Any = None, **kwargs: Any) -> None:
    """tensor_split along the second dimension (of a vector, the first)."""
    tensor_split(tracer, out, x, given, min(1, x.ndim - 1), **kwargs)


@sizes(torch.vsplit, Tensor.vsplit)
def vsplit(tracer: Tracer, out: Any, /, x: Any, given: Any = None, **kwargs: Any) -> None:
    """tensor_split along the first dimension."""
    tensor_split(tracer, out, x, given, 0, **kwargs)


@sizes(torch.dsplit, Tensor.dsplit)
def dsplit(tracer: Tracer, out: Any, /, x: Any, given: Any = None, **kwargs: Any) -> None:
    """tensor_split along the third dimension."""
    tensor_split(tracer, out, x, given, 2, **kwargs)


@sizes(*_both("narrow", "narrow_copy"))
def narrow(tracer: Tracer, out: Any, /, x: Any, dim: int, start: Any, length: Any) -> None:
    """narrow(dim, start, length)."""
    tracer.expect_slice(x, dim % x.ndim, start, start + length)


@sizes(Tensor.__getitem__, Tensor.__setitem__)
def getitem(tracer: Tracer, out: Any, /, x: Any, key: Any, *_: Any) -> None:
    """x[a:b, i, …]: bounds and numbers are positions of the dimension that they cut."""
    keys = key if isinstance(key, tuple) else (key,)
    taken = sum(1 for k in keys if k is not None and k is not Ellipsis and not isinstance(k, bool))
    taken += sum(k.ndim - 1 for k in keys if isinstance(k, Tensor) and k.dtype == torch.bool)
    dim = 0
    for k in keys:
        if k is Ellipsis:
            dim += x.ndim - taken
        elif isinstance(k, slice):
            if k.start is not None or k.stop is not None:
                tracer.expect_slice(x, dim, k.start, k.stop, k.step)
            dim += 1
        elif k is not None and not isinstance(k, bool):
            if isinstance(k, int):
                tracer.expect_position(x, dim, k)
            dim += k.ndim if isinstance(k, Tensor) and k.dtype == torch.bool else 1


@sizes(*_both("select", "select_copy"))
def select(tracer: Tracer, out: Any, /, x: Any, dim: int, index: Any) -> None:
    """select(dim, index)."""
    if isinstance(index, int):
        tracer.expect_position(x, dim % x.ndim, index)


@sizes(F.layer_norm, torch.layer_norm, torch.rms_norm, F.rms_norm)
def normalized_shape(tracer: Tracer, out: Any, /, x: Any, shape: Any = None, *_: Any, **kwargs: Any) -> None:
    """layer_norm(x, normalized_shape)."""
    shape = kwargs.get("normalized_shape", shape)
    dims = _dims(tracer, x)
    _expect_all(tracer, shape, dims[len(dims) - len(shape) :])


@sizes(torch.group_norm, F.group_norm)
def group_norm(tracer: Tracer, out: Any, /, x: Any, groups: Any = None, *_: Any, **kwargs: Any) -> None:
    """group_norm(x, groups)."""
    _expect_groups(tracer, kwargs.get("num_groups", groups))


@sizes(torch.channel_shuffle, F.channel_shuffle, torch.native_channel_shuffle)
def channel_shuffle(tracer: Tracer, out: Any, /, x: Any, groups: Any = None, **kwargs: Any) -> None:
    """channel_shuffle(x, groups)."""
    _expect_groups(tracer, kwargs.get("groups", groups))


@sizes(torch.conv1d, torch.conv2d, torch.conv3d)
def convolution(tracer: Tracer, out: Any, /, *args: Any, **kwargs: Any) -> None:
    """conv(x, weight, bias, stride, padding, dilation, groups)."""
    _expect_groups(tracer, args[6] if len(args) > 6 else kwargs.get("groups", 1))


@sizes(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
def convolution_transposed(tracer: Tracer, out: Any, /, *args: Any, **kwargs: Any) -> None:
    """conv_transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)."""
    _expect_groups(tracer, args[6] if len(args) > 6 else kwargs.get("groups", 1))


def _expect_groups(tracer: Tracer, groups: Any) -> None:
    if tracer.group_axis is not None and isinstance(groups, int):
        tracer.expect(groups, tracer.group_axis)
        tracer.group_axis = None


@sizes(*_both("repeat", "tile"))
def repeat(tracer: Tracer, out: Any, /, x: Any, *args: Any, **kwargs: Any) -> None:
    """repeat(counts): each count is the size of a new axis."""
    counts = _listed(args or tuple(kwargs.values()))
    for count, layout in zip(reversed(counts), reversed(tracer.repeats), strict=False):
        if layout is not None:
            tracer.expect(count, layout)
    tracer.repeats = ()


@sizes(*_both("repeat_interleave"))
def repeat_interleave(tracer: Tracer, out: Any, /, *args: Any, **kwargs: Any) -> None:
    """repeat_interleave(x, count): the count is the size of the one new axis."""
    count = args[1] if len(args) > 1 else kwargs.get("repeats")
    for axis in list(tracer.fresh):
        tracer.expect(count, axis)


@sizes(F.pad, torch._C._nn.pad, torch.constant_pad_nd)
def pad(tracer: Tracer, out: Any, /, x: Any, widths: Any = None, *_: Any, **kwargs: Any) -> None:
    """pad(x, widths): each width is the size of a new piece; a negative one of a piece that goes."""
    for width, layout in zip(kwargs.get("pad", widths), tracer.pads, strict=False):
        if layout is not None:
            tracer.expect(width if width >= 0 else -width, layout)
    tracer.pads = ()


# Sizes that say how space, steps or classes are laid out; their dimensions are fixed by the rules already.
_NEUTRAL = _both(
    "flatten", "transpose", "permute", "unsqueeze", "squeeze", "movedim", "swapaxes", "swapdims", "unbind",
    "cat", "concat", "stack", "softmax", "log_softmax", "sum", "mean", "std", "var", "amax", "amin", "max", "min",
    "norm", "cumsum", "gather", "index_select", "flip", "roll", "sort", "topk", "argmax", "argmin", "dim", "size",
    "any", "all", "prod", "unfold", "take_along_dim", "diagonal", "tril", "triu", "logsumexp", "max_pool1d",
    "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "randint",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "embedding",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_linear1d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "im2col",
    "col2im", "glu", "pixel_shuffle", "pixel_unshuffle", "embedding_bag", "max_pool1d_with_indices", "argsort",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "cosine_similarity", "tensordot", "bincount", "histc",
    "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_", "index_put_", "index_copy_",
    "cumprod", "_weight_norm", "normalize", "lstm", "gru", "rnn_tanh", "rnn_relu", "one_hot",
    "_pack_padded_sequence", "_pad_packed_sequence", "logcumsumexp", "grid_sampler", "item",
)  # fmt: skip


@sizes(*(f for f in _NEUTRAL if f is not None))
def neutral(tracer: Tracer, out: Any, /, *args: Any, **kwargs: Any) -> None:
    """Ints here number dimensions, or describe dimensions that the rules fix."""
