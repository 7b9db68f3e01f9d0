"""Ops that work on each element by itself: all dimensions of all operands are the same thing."""

from __future__ import annotations

from collections.abc import Iterable
from operator import or_
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from secateur.axes import constant, resolve, split, unify
from secateur.trace.registry import rule
from secateur.trace.value import Call, Value

aten = torch.ops.aten


@rule(
    aten.hardswish.default,
    aten._prelu_kernel.default,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.true_divide.Scalar,
    aten.rsub.Tensor,
    aten.polar.default,
    aten.complex.default,
    aten.real.default,
    aten.imag.default,
    aten.__and__,
    aten.__or__,
    aten.__xor__,
)
def elementwise(call: Call, *args: Any, **kwargs: Any) -> Value | list[Value]:
    """out[i, j, …] = f(a[i, j, …], b[i, j, …], …), with broadcasting."""
    values = list(_values(args)) + list(_values(kwargs.values()))
    dims = call.broadcast(*values)
    if len(call.outs) > 1:
        return [Value(dims, False) for _ in call.outs]
    anywhere = tuple(any(_zero_at(v, i) for i in range(len(v.dims))) for v in values)
    zero = []
    for back in range(-len(call.shape), 0):
        pattern = tuple(_zero_along(v, back, call.shape[back]) for v in values)
        # Where another dimension is removed too, an operand may be zero that is not along this one: 0 / 0.
        corner = tuple(map(or_, pattern, anywhere))
        zero.append(any(pattern) and all(_gives_zero(call.op, p, args, kwargs) for p in (pattern, corner)))
    return Value(dims, zero)


def _zero_at(value: Value, dim: int) -> bool:
    return value.is_zero(dim) and not constant(resolve(value.dims[dim]))


def _values(items: Iterable[Any]) -> Iterable[Value]:
    for item in items:
        if isinstance(item, Value):
            yield item
        elif isinstance(item, list):
            yield from _values(item)


def _zero_along(value: Value, back: int, size: int) -> bool:
    """Whether an operand is zero where a position of the result is removed; a broadcast one is not."""
    return len(value.dims) >= -back and value.dims[back].size == size and value.is_zero(back)


_ANSWERS: dict[Any, bool] = {}


def _gives_zero(op: Any, pattern: tuple[bool, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op maps to zero when the operands of the pattern are zero, found out by running it."""
    scalars = tuple(repr(a) for a in args if not isinstance(a, Value | list)) + tuple(
        f"{k}={v!r}" for k, v in kwargs.items() if not isinstance(v, Value) and k in ("value", "alpha")
    )
    key = (op, pattern, scalars)
    if key not in _ANSWERS:
        _ANSWERS[key] = _try_zero(op, pattern, args, kwargs)
    return _ANSWERS[key]


def _try_zero(op: Any, pattern: tuple[bool, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    flags = iter(pattern)

    def probe(item: Any) -> Any:
        if isinstance(item, Value):
            return torch.zeros_like(probes) if next(flags) else probes.clone()
        if isinstance(item, list):
            return [probe(i) for i in item]
        return item

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        probes = torch.tensor([-3.7, -0.6, 0.3, 1.0, 2.9], dtype=torch.float64)
        try:
            chosen = {k: probe(v) for k, v in kwargs.items() if k in ("value", "alpha", "rounding_mode")}
            out = op(*[probe(a) for a in args], **chosen)
            return bool((out == 0).all())
        except (RuntimeError, TypeError, NotImplementedError):
            return False


@rule(
    aten.clone,
    aten.alias,
    aten.detach,
    aten._to_copy,
    aten.lift_fresh,
    aten.lift_fresh_copy,
    aten.contiguous,
    aten.positive,
    aten.dropout,
    aten._conj,
    aten.resolve_conj,
    aten.resolve_neg,
    aten.lift,
    aten.to_dense,
)
def same(call: Call, x: Value, *_: Any, **__: Any) -> Value:
    """out = x."""
    return Value(x.dims, [x.is_zero(i) for i in range(len(x.dims))])


@rule(aten.log_sigmoid_forward.default, aten.rrelu_with_noise.default)
def with_buffer(call: Call, x: Value, *args: Any, **_: Any) -> list[Value]:
    """out = f(x), and what its gradient will need."""
    call.broadcast(x, *_values(args))
    return [Value(x.dims, False) if shape == x.shape else None for shape in call.outs]  # type: ignore[misc]


@rule(aten.glu.default)
def glu(call: Call, x: Value, dim: int = -1) -> Value:
    """out = a * sigmoid(b), where x is a and b one after the other."""
    dim %= len(x.dims)
    first, second = split(x.dims[dim], x.dims[dim].size // 2)
    unify(first, second)
    return Value([*x.dims[:dim], resolve(first), *x.dims[dim + 1 :]], x.zero)


@rule(aten.native_dropout)
def native_dropout(call: Call, x: Value, *_: Any, **__: Any) -> tuple[Value, Value]:
    """out = x * mask."""
    return same(call, x), Value(x.dims, False)


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(call: Call, condition: Value, a: Any, b: Any) -> Value:
    """out = a where the condition holds, else b."""
    sides = [v for v in (a, b) if isinstance(v, Value)]
    dims = call.broadcast(condition, *sides)
    zero = [
        len(sides) == 2 and all(_zero_along(v, back, call.shape[back]) for v in sides)
        for back in range(-len(call.shape), 0)
    ]
    return Value(dims, zero)


@rule(aten.masked_fill)
def masked_fill(call: Call, x: Value, mask: Value, value: Any, **_: Any) -> Value:
    """out = value where masked, else x."""
    dims = call.broadcast(x, mask)
    keeps = isinstance(value, int | float) and value == 0
    return Value(dims, [keeps and _zero_along(x, back, call.shape[back]) for back in range(-len(dims), 0)])


@rule(aten.copy_, aten.copy)
def copy(call: Call, x: Value, source: Any, *_: Any, **__: Any) -> Value:
    """out = source, in x's place."""
    if not isinstance(source, Value):
        return Value(x.dims, False)
    padded = Value(call.broadcast(x, source), True)
    zero = [_zero_along(source, back, call.shape[back]) for back in range(-len(call.shape), 0)]
    return Value(padded.dims, zero)


@rule(
    aten.fill,
    aten.fill_,
    aten.zero_,
    aten.zero,
    aten.bernoulli_,
    aten.uniform_,
    aten.normal_,
    aten.exponential_,
)
def fill(call: Call, x: Value, *args: Any, **_: Any) -> Value:
    """Every element of x becomes a number that does not depend on where it is."""
    return Value(call.broadcast(x, *_values(args)), "zero" in call.name)


@rule(
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.empty_like,
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten.bernoulli,
)
def like(call: Call, x: Value, *args: Any, **_: Any) -> Value:
    """A tensor of x's shape whose elements do not depend on where they are."""
    return Value(call.broadcast(x, *_values(args)), call.name == "zeros_like")


@rule(aten.view_as_real)
def view_as_real(call: Call, x: Value) -> Value:
    """A complex number becomes a last dimension of two."""
    return Value([*x.dims, call.fixed(2, "real and imaginary part")], [*x.zero, False])


@rule(aten.view_as_complex)
def view_as_complex(call: Call, x: Value) -> Value:
    """A last dimension of two becomes a complex number."""
    call.fix(x.dims[-1], "real and imaginary part")
    return Value(x.dims[:-1], x.zero[:-1])
