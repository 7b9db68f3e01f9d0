"""Normalisations, and weights that are kept as a direction and a length."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.axes import Product, constant, factor, hint, resolve, unify
from secateur.compat import aten
from secateur.ops.absent import NAN, filled, gone
from secateur.ops.record import op
from secateur.ops.reduce import mean_of_present, norm_of_present, variance_of_present
from secateur.ops.value import Call, Value, layouts_of
from secateur.sizes.explain import Explainer
from secateur.sizes.size import plain


def _affine(call: Call, x: Value, at: int, *vectors: Value | None) -> None:
    for vector in vectors:
        if vector is not None and vector.dims:
            unify(x.dims[at], vector.dims[0])


# Batch norms that take (x, weight, bias, mean, variance, training, momentum, eps), as models call them.
BATCH_NORMS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}


@op(
    *BATCH_NORMS,
    "_native_batch_norm_legit.default _native_batch_norm_legit_no_training.default _native_batch_norm_legit.no_stats",
)
def batch_norm(call: Call, x: Value, weight: Value | None, bias: Value | None, *rest: Any) -> tuple[Value, ...]:
    """out[n, c, …] = (x[n, c, …] - mean[c]) / deviation[c] * weight[c] + bias[c]."""
    stats = [v for v in rest if isinstance(v, Value)]
    training = any(v is True for v in rest)
    _affine(call, x, 1, weight, bias, *stats)
    for i in range(len(x.dims)):
        if i != 1 and (training or not stats):
            call.note(x.dims[i], "a statistic is taken over it")
    scaled = weight is not None and weight.is_zero(0)
    centred = x.is_zero(1) and (training or not stats or stats[0].is_zero(0))
    clean = (scaled or centred) and (bias is None or bias.is_zero(0))
    zero = [i == 1 and clean for i in range(len(x.dims))]
    saved = [Value([x.dims[1]] if shape else [], False) if shape != (0,) else None for shape in call.outs[1:]]
    return Value(x.dims, zero), *(
        v if v is not None and v.shape == shape else Value([call.fixed(n) for n in shape])
        for v, shape in zip(saved, call.outs[1:], strict=True)
    )


@batch_norm.absent
def _(op: Any, x: Tensor, weight: Any, bias: Any, *rest: Any) -> Any:
    stats = [v for v in rest if isinstance(v, Tensor)]
    training = not stats or any(v is True for v in rest)
    if training:
        over = [i for i in range(x.ndim) if i != 1]
        stats = [mean_of_present(x, over, False), variance_of_present(x, over, 0, False)]
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, rstd = stats[0], (stats[1] + rest[-1]).rsqrt()
    out = _scaled((x - mean.reshape(shape)) * rstd.reshape(shape), weight, bias, shape)
    return (out, mean, rstd) if training else (out, x.new_empty(0), x.new_empty(0))


@op(aten.native_layer_norm.default)
def layer_norm(
    call: Call, x: Value, shape: Any, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, ...]:
    """Normalised over the last dimensions, then scaled and shifted."""
    return _last_dims_norm(call, x, len(shape), weight, bias)


@layer_norm.sizes("layer_norm", "native_layer_norm", "rms_norm", F.layer_norm, F.rms_norm)
def _(explain: Explainer, out: Any, input: Any, normalized_shape: Any, *_: Any) -> None:
    explain.expect_all(normalized_shape, layouts_of(input)[-len(normalized_shape) :])


@layer_norm.absent
def _(op: Any, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    over = list(range(x.ndim - len(shape), x.ndim))
    mean = mean_of_present(x, over, True)
    rstd = (variance_of_present(x, over, 0, True) + eps).rsqrt()
    return _scaled((x - mean) * rstd, weight, bias), mean, rstd


@layer_norm.resize
def shape_of_the_last(args: list[Any], _: Mapping[int, Sequence[int]]) -> None:
    """The shape that is normalised over is that of the last dimensions."""
    args[1] = list(args[0].shape[-len(args[1]) :])


RMS_NORMS = {aten._fused_rms_norm.default, aten.rms_norm.default}  # that take (x, shape, weight, eps)


@op(*RMS_NORMS)
def rms_norm(call: Call, x: Value, shape: Any, weight: Value | None, eps: float | None = None) -> tuple[Value, ...]:
    """Divided by the root of the mean square over the last dimensions, then scaled."""
    return _last_dims_norm(call, x, len(shape), weight, None)


rms_norm.resize(shape_of_the_last)


@rms_norm.absent
def _(op: Any, x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    over = list(range(x.ndim - len(shape), x.ndim))
    rstd = (mean_of_present(x.square(), over, True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    out = _scaled(x * rstd, weight, None)
    return out if op is aten.rms_norm.default else (out, rstd)


def _scaled(out: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int] | None = None) -> Tensor:
    """Times a weight, plus a bias, brought to a shape."""
    weight, bias = (v if v is None or shape is None else v.reshape(shape) for v in (weight, bias))
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _last_dims_norm(call: Call, x: Value, n: int, weight: Value | None, bias: Value | None) -> tuple[Value, ...]:
    first = len(x.dims) - n
    for i, dim in enumerate(x.dims[first:]):
        for vector in (weight, bias):
            if vector is not None:
                unify(dim, vector.dims[i])
        call.note(dim, "a statistic is taken over it")
    scaled = weight is not None and (bias is None or all(bias.zero))
    zero = [False] * first + [scaled and weight.is_zero(i) for i in range(n)]  # type: ignore[union-attr]
    stats = Value([*x.dims[:first], *(call.fixed(1) for _ in range(n))], False)
    return Value(x.dims, zero), *(
        Value(stats.dims, False) if stats.shape == shape else Value([call.fixed(s) for s in shape])
        for shape in call.outs[1:]
    )


@op(aten.native_group_norm.default)
def group_norm(
    call: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: int,
    c: int,
    hw: int,
    groups: int,
    eps: float,
) -> tuple[Value, ...]:
    """Normalised over (channels of a group × space), then scaled and shifted per channel."""
    group, inner = factor(x.dims[1], groups)
    for layout in (inner, *x.dims[2:]):
        call.note(layout, "a statistic is taken over it")
    if not constant(resolve(inner)):
        hint(group, "groups", "groups", "groups")
    _affine(call, x, 1, weight, bias)
    zero = [False] * len(x.dims)
    scaled = weight is not None and weight.is_zero(0)
    zero[1] = (scaled or (inner.size == 1 and x.is_zero(1))) and (bias is None or bias.is_zero(0))
    stats = Value([x.dims[0], group], False)
    return Value(x.dims, zero), stats, Value(stats.dims, False)


@group_norm.sizes("group_norm", F.group_norm)
def _(explain: Explainer, out: Any, input: Any, num_groups: Any, *_: Any) -> None:
    if layouts_of(input):
        explain.expect(num_groups, factor(layouts_of(input)[1], plain(num_groups))[0])


@group_norm.sizes("native_group_norm")
def _(
    explain: Explainer, out: Any, input: Any, weight: Any, bias: Any, n: Any, c: Any, hw: Any, g: Any, *_: Any
) -> None:
    layouts = layouts_of(input)
    if layouts:
        explain.expect_all((n, c, hw), (*layouts[:2], Product(layouts[2:])))
        explain.expect(g, factor(layouts[1], plain(g))[0])


@group_norm.absent
def _(op: Any, x: Tensor, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float) -> Any:
    grouped = x.reshape(n, groups, -1)
    mean = mean_of_present(grouped, [2], True)
    rstd = (variance_of_present(grouped, [2], 0, True) + eps).rsqrt()
    out = ((grouped - mean) * rstd).reshape(x.shape)
    return _scaled(out, weight, bias, (1, -1, *[1] * (x.ndim - 2))), mean.squeeze(2), rstd.squeeze(2)


@group_norm.resize
def _(args: list[Any], _: Mapping[int, Sequence[int]]) -> None:
    x = args[0].shape
    args[3:6] = [x[0], x[1], math.prod(x[2:])]


@op(aten._weight_norm_interface.default, aten._weight_norm.default, called="_weight_norm")
def weight_norm(call: Call, v: Value, g: Value, dim: int = 0) -> Any:
    """weight = g * v / ‖v‖, the norm over every dimension but one; 0 / 0 counts as 0."""
    zero = []
    for i, layout in enumerate(v.dims):
        if g.dims[i].size == layout.size:
            unify(g.dims[i], layout)
            zero.append(g.is_zero(i) or v.is_zero(i))
        else:
            call.reduce(v, i)
            zero.append(v.is_zero(i))
    out = Value(v.dims, zero)
    return (out, Value(g.dims, v.zero)) if len(call.outs) == 2 else out


@weight_norm.absent
def _(op: Any, v: Tensor, g: Tensor, dim: int = 0) -> Any:
    length = norm_of_present(v, 2, [i for i in range(v.ndim) if i != dim % v.ndim], True)
    out = v * (g / length)
    return (out, length) if op is aten._weight_norm_interface.default else out


@op(aten.renorm.default, called="renorm renorm_")
def renorm(call: Call, x: Value, order: float, dim: int, *_: Any) -> Value:
    """Each slice along a dimension, made shorter where its norm is above a limit: zeros add nothing to a norm."""
    for i in range(len(x.dims)):
        if i != dim % len(x.dims):
            call.reduce(x, i, needs_zero=order > 0)
    return Value(x.dims, x.zero)


@op(aten.embedding_renorm_.default)
def embedding_renorm(call: Call, weight: Value, indices: Value, limit: float, order: float) -> Value:
    """Those rows of a table that are looked up, made shorter where their norm is above a limit."""
    call.opaque(Value(weight.dims[:1]), indices, reason="its positions are chosen by an index")
    call.reduce(weight, 1, needs_zero=order > 0)
    return Value(weight.dims, weight.zero)


@renorm.absent
@embedding_renorm.absent
def _(op: Any, x: Tensor, *args: Any) -> Tensor:
    """Over what is present."""
    before = gone(x)
    written = op is aten.embedding_renorm_.default
    return op(x.masked_fill_(before, 0.0) if written else filled(x), *args).masked_fill_(before, NAN)


NORMS = frozenset({batch_norm, layer_norm, rms_norm, group_norm})  # of activations
