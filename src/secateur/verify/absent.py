"""What a model computes when some positions are absent.

A removed position is NaN. Elementwise ops carry that along by themselves; ops that sum, average or normalise skip
what is absent; an element is absent when nothing that it is made of is present. The full-size model, run this way,
must put out what the cut model does, whether the cut is exact or not. Nothing here knows of axes or of rules.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.nn.attention import multi_head_attention_forward
from secateur.trace.capture import unscripted
from secateur.trace.held import Walk
from secateur.trace.sizes import Place
from secateur.verify.recurrence import RECURRENT

aten = torch.ops.aten
NAN = float("nan")


# counts that change ------------------------------------------------------------------------------------------


class Count(int):
    """An int that is a size now and, used as a number, what it will be after the cut."""

    after: Callable[[], int]

    def __new__(cls, now: int, after: Callable[[], int]) -> Count:
        self = super().__new__(cls, now)
        self.after = after
        return self

    def __float__(self) -> float:
        return float(self.after())

    def __truediv__(self, other: Any) -> Any:
        return self.after() / _after(other)

    def __rtruediv__(self, other: Any) -> Any:
        return _after(other) / self.after()

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __deepcopy__(self, memo: Any) -> Count:
        return self

    def __reduce__(self) -> Any:
        return int, (int.__index__(self),)


def _after(value: Any) -> Any:
    return value.after() if isinstance(value, Count) else value


def _whole(name: str, swapped: bool) -> None:
    compute = getattr(operator, name)

    def method(self: Count, other: Any) -> Any:
        a, b = (other, self) if swapped else (self, other)
        if isinstance(other, float) or (name == "pow" and (isinstance(b, float) or b < 0)):
            return compute(_after(a), _after(b))
        if not isinstance(other, int):
            return NotImplemented
        now = compute(int.__index__(a), int.__index__(b))
        return Count(now, lambda: compute(_after(a), _after(b)))

    setattr(Count, f"__{'r' if swapped else ''}{name}__", method)


for _name in ("add", "sub", "mul", "floordiv", "mod", "pow"):
    _whole(_name, swapped=False)
    _whole(_name, swapped=True)


def present_along(x: Tensor, dim: int) -> int:
    """How many positions of a dimension hold anything."""
    if not x.is_floating_point() or x.numel() == 0:
        return x.shape[dim]
    there = ~x.isnan().movedim(dim, 0).flatten(1) if x.ndim > 1 else ~x.isnan().unsqueeze(1)
    return int(there.any(1).sum())


# ops -----------------------------------------------------------------------------------------------------------

_OPS: dict[Any, Callable[..., Any]] = {}


def _op(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            _OPS[op] = function
        return function

    return register


def _absent(x: Any) -> Tensor:
    return x.isnan() if x.is_floating_point() or x.is_complex() else torch.zeros_like(x, dtype=torch.bool)


def _mark(out: Tensor, gone: Tensor) -> Tensor:
    """NaN where something is absent; a tensor of whole numbers has no way to say so."""
    return out.masked_fill(gone, NAN) if out.is_floating_point() else out


def _product(op: Any, a: Tensor, b: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    """A bilinear op over what is present; an output is present when any pair of its factors is."""
    gone_a, gone_b = _absent(a), _absent(b)
    out = op(a.masked_fill(gone_a, 0), b.masked_fill(gone_b, 0), *rest, **kwargs)
    if gone_a.any() or gone_b.any():
        pairs = op((~gone_a).to(a.dtype), (~gone_b).to(b.dtype), *rest, **kwargs)
        out = out.masked_fill(pairs == 0, NAN)
    return out


@_op(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten._grouped_mm.default)
def _bilinear(op: Any, a: Tensor, b: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    return _product(op, a, b, *rest, **kwargs)


_PLAIN = {
    aten.addmm.default: aten.mm.default,
    aten.baddbmm.default: aten.bmm.default,
    aten.addmv.default: aten.mv.default,
}


@_op(*_PLAIN)
def _bilinear_plus(op: Any, bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    out = alpha * _product(_PLAIN[op], a, b)
    return out + beta * bias if beta else out


@_op(aten.convolution.default)
def _convolution(op: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return op(x, weight, None, *rest)

    out = _product(linear, x, weight)
    return out if bias is None else out + bias.reshape(1, -1, *[1] * (out.ndim - 2))


@_op(aten._trilinear.default)
def _trilinear(op: Any, a: Tensor, b: Tensor, c: Tensor, *rest: Any) -> Tensor:
    gone = [_absent(t) for t in (a, b, c)]
    out = op(*(t.masked_fill(g, 0) for t, g in zip((a, b, c), gone, strict=True)), *rest)
    pairs = op(*((~g).to(a.dtype) for g in gone), *rest)
    return out.masked_fill(pairs == 0, NAN)


def _count(x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    return (~_absent(x)).to(x.dtype if x.is_floating_point() else torch.float64).sum(dim, keepdim=keepdim)


def _dims(x: Tensor, dim: Any) -> list[int]:
    listed = dim if isinstance(dim, list | tuple) else [dim]
    return list(range(x.ndim)) if dim is None or not listed else [d % max(x.ndim, 1) for d in listed]


@_op(aten.sum.dim_IntList, aten.sum.default)
def _sum(op: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    over = _dims(x, dim)
    out = aten.sum.dim_IntList(x.masked_fill(_absent(x), 0), over, keepdim, **kwargs)
    return _mark(out, _count(x, over, keepdim) == 0)


@_op(aten.mean.dim, aten.mean.default)
def _mean(op: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    over = _dims(x, dim)
    return x.masked_fill(_absent(x), 0).sum(over, keepdim=keepdim) / _count(x, over, keepdim)


@_op(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def _var(op: Any, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    over = _dims(x, dim)
    mean = _mean(op, x, over, True)
    spread = (x - mean).masked_fill(_absent(x), 0).square().sum(over, keepdim=keepdim)
    out = spread / (_count(x, over, keepdim) - (1 if correction is None else correction))
    out = out.sqrt() if "std" in str(op) else out
    return (out, mean if keepdim else _mean(op, x, over, False)) if "mean" in str(op) else out


@_op(aten.amax.default, aten.amin.default)
def _extreme(op: Any, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    over = _dims(x, dim)
    out = op(x.masked_fill(_absent(x), -math.inf if op is aten.amax.default else math.inf), over, keepdim)
    return out.masked_fill(_count(x, over, keepdim) == 0, NAN)


@_op(aten.logsumexp.default)
def _logsumexp(op: Any, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    return op(x.masked_fill(_absent(x), -math.inf), dim, keepdim)


@_op(aten.linalg_vector_norm.default)
def _norm(op: Any, x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    over = _dims(x, dim)
    out = op(x.masked_fill(_absent(x), 0), order, over, keepdim, **kwargs)
    return out.masked_fill(_count(x, over, keepdim) == 0, NAN)


@_op(aten.cumsum.default)
def _cumsum(op: Any, x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    return _mark(op(x.masked_fill(_absent(x), 0), dim, **kwargs), _absent(x))


@_op(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def _softmax(op: Any, x: Tensor, dim: int, *rest: Any, **kwargs: Any) -> Tensor:
    gone = _absent(x)
    out = op(x.masked_fill(gone, -math.inf), dim, *rest, **kwargs)
    return out.masked_fill(gone, NAN)


@_op(aten.native_layer_norm.default)
def _layer_norm(op: Any, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    over = list(range(x.ndim - len(shape), x.ndim))
    mean = _mean(op, x, over, True)
    var = _var(aten.var.correction, x, over, correction=0, keepdim=True)
    rstd = (var + eps).rsqrt()
    return _affine((x - mean) * rstd, weight, bias), mean, rstd


@_op(aten._fused_rms_norm.default)
def _rms_norm(op: Any, x: Tensor, shape: Any, weight: Any, eps: float | None) -> Any:
    over = list(range(x.ndim - len(shape), x.ndim))
    rstd = (_mean(op, x.square(), over, True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return _affine(x * rstd, weight, None), rstd


def _affine(out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


@_op(aten.native_group_norm.default)
def _group_norm(op: Any, x: Tensor, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float) -> Any:
    grouped = x.reshape(n, groups, -1)
    out, mean, rstd = _layer_norm(op, grouped, grouped.shape[-1:], None, None, eps)
    shape = (1, -1, *[1] * (x.ndim - 2))
    vectors = (None if v is None else v.reshape(shape) for v in (weight, bias))
    return _affine(out.reshape(x.shape), *vectors), mean.reshape(n, groups), rstd.reshape(n, groups)


@_op(aten.native_batch_norm.default)
def _batch_norm(
    op: Any,
    x: Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if training or mean is None:
        over = [i for i in range(x.ndim) if i != 1]
        mean = _mean(op, x, over, False)
        var = _var(aten.var.correction, x, over, correction=0)
    shape = (1, -1, *[1] * (x.ndim - 2))
    out = (x - mean.reshape(shape)) * (var.reshape(shape) + eps).rsqrt()
    vectors = (None if v is None else v.reshape(shape) for v in (weight, bias))
    return _affine(out, *vectors), mean, var


@_op(aten._weight_norm_interface.default)
def _weight_norm(op: Any, v: Tensor, g: Tensor, dim: int = 0) -> Any:
    over = [i for i in range(v.ndim) if i != dim % v.ndim]
    length = _norm(aten.linalg_vector_norm.default, v, 2, over, True)
    return v * (g / length), length


@_op(aten.where.self)
def _where(op: Any, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _mark(op(condition, a, b), _absent(a) | _absent(b))


@_op(aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar)
def _masked_fill(op: Any, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    gone = _absent(x)
    out = op(x, mask, value)
    return out.masked_fill_(gone, NAN) if op is aten.masked_fill_.Scalar else _mark(out, gone)


@_op(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def _like(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _mark(op(x, *args, **kwargs), _absent(x))


class AbsentOps(TorchDispatchMode):
    """Every op that looks at more than one element, done over what is present."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _OPS.get(func)
        if replacement is None or not any(isinstance(a, Tensor) and _absent(a).any() for a in args):
            return func(*args, **(kwargs or {}))
        return replacement(func, *args, **(kwargs or {}))


_NUMBER_OPS = {
    getattr(home, name)
    for home in (Tensor, torch)
    for name in (
        "add", "sub", "mul", "div", "true_divide", "pow", "rsub", "subtract", "multiply", "divide", "full_like",
        "__add__", "__sub__", "__mul__", "__truediv__", "__pow__", "__radd__", "__rsub__", "__rmul__", "__rtruediv__",
        "__rpow__", "mul_", "div_", "add_", "sub_", "floor_divide", "tensor", "scalar_tensor", "__rdiv__", "__div__",
    )
    if hasattr(home, name)
}  # fmt: skip


class AbsentFunctions(TorchFunctionMode):
    """Functions whose kernels would hide a sum or a size, spelled out; sizes that know what they will be."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
            return self._shape(args[0])
        if func is Tensor.size:
            shape = self._shape(args[0])
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return shape if dim is None else shape[dim]
        if func is F.scaled_dot_product_attention:
            with self:
                return _attention(*args, **kwargs)
        if func in RECURRENT:
            with self:
                return RECURRENT[func](*args, **kwargs)
        if func in _NUMBER_OPS:
            args, kwargs = tuple(map(_after, args)), {k: _after(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)

    def _shape(self, x: Tensor) -> torch.Size:
        return torch.Size([Count(n, partial(present_along, x, i)) for i, n in enumerate(tuple(x.size()))])


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        k, v = (x.repeat_interleave(q.size(-3) // x.size(-3), -3) for x in (k, v))
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    scores = (q * scale) @ k.transpose(-2, -1)
    if is_causal:
        keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -math.inf)
        scores = scores + attn_mask
    return torch.softmax(scores, -1).nan_to_num_(nan=NAN) @ v


class Absence(ExitStack):
    """The context in which a full-size model computes with absent positions."""

    def __init__(self, model: nn.Module, attributes: Mapping[Place, int]) -> None:
        super().__init__()
        self._model = model
        self._attributes = attributes

    def __enter__(self) -> Absence:
        super().__enter__()
        Walk(self._model).replace(
            lambda value, place: Count(value, lambda: self._attributes[place]) if place in self._attributes else value
        )
        F.multi_head_attention_forward = _keeping_scale  # `untouched` puts torch's own back
        self.enter_context(unscripted())
        self.enter_context(AbsentOps())
        self.enter_context(AbsentFunctions())
        return self


def _keeping_scale(*args: Any, **kwargs: Any) -> Any:
    """Torch's attention module, with the scale that its scores have before the cut."""
    width, heads = int.__index__(args[3]), int.__index__(args[4])
    return multi_head_attention_forward(*args, **{"scale": 1 / math.sqrt(width // heads), **kwargs})
