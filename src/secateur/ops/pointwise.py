"""Ops that work on each element by itself: all dimensions of all operands are the same thing."""

from collections.abc import Iterable
from operator import or_
from typing import Any

import torch
from torch import Tensor

from secateur.axes import constant, resolve, split, unify
from secateur.compat import aten, prims, without_modes, without_torch_function
from secateur.ops.absent import filled, gone, mark, still_absent
from secateur.ops.record import op, overloads
from secateur.ops.value import Call, Value

# Functions whose ints are numbers to compute with, not sizes.
TAKE_NUMBERS = {
    getattr(home, name)
    for home in (Tensor, torch)
    for name in (
        "add", "sub", "mul", "div", "true_divide", "pow", "rsub", "subtract", "multiply", "divide", "full_like",
        "__add__", "__sub__", "__mul__", "__truediv__", "__pow__", "__radd__", "__rsub__", "__rmul__", "__rtruediv__",
        "__rpow__", "mul_", "div_", "add_", "sub_", "floor_divide", "tensor", "scalar_tensor", "__rdiv__", "__div__",
    )
    if hasattr(home, name)
}  # fmt: skip
SUMS = {aten.add.Tensor, aten.add_.Tensor}
ADDITIONS = frozenset(overloads("add add_ sub sub_ lerp lerp_ addcmul addcmul_"))  # to one operand, of something
SCALES = {aten.mul.Tensor, aten.mul_.Tensor}
LINEAR_IN_ALL = SUMS | {aten.sub.Tensor, aten.sub_.Tensor, aten.cat.default, aten.stack.default}  # operands together
LINEAR_IN_ONE = SCALES | {aten.div.Tensor, aten.div_.Tensor, aten.where.self, aten.masked_fill.Scalar, aten.neg.default}
LINEAR_IN_ONE |= {aten.clone.default, aten._to_copy.default, aten.copy_.default}


@op(
    "hardswish.default _prelu_kernel.default floor_divide.default floor_divide.Scalar true_divide.Scalar "
    "rsub.Tensor polar.default complex.default real.default imag.default __and__ __or__ __xor__",
    *(prims.add.default, prims.sub.default, prims.mul.default, prims.div.default, prims.neg.default),  # in tangents
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

    with without_modes(), without_torch_function():
        probes = torch.tensor([-3.7, -0.6, 0.3, 1.0, 2.9], dtype=torch.float64)
        try:
            chosen = {k: probe(v) for k, v in kwargs.items() if k in ("value", "alpha", "rounding_mode")}
            out = op(*[probe(a) for a in args], **chosen)
            return bool((out == 0).all())
        except (RuntimeError, TypeError, NotImplementedError):
            return False


@op(
    "threshold_backward.default elu_backward.default hardsigmoid_backward.default hardswish_backward.default "
    "hardtanh_backward.default leaky_relu_backward.default log_sigmoid_backward.default mish_backward.default "
    "softplus_backward.default",
)
def slope(call: Call, *args: Any, **kwargs: Any) -> Value | list[Value]:
    """out = f'(x) times what comes back, for each element."""
    return elementwise(call, *args, **kwargs)


@slope.absent
def _(op: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Where f is flat, nothing is left of NaN."""
    out = op(*args, **kwargs)
    for given in (*args, *kwargs.values()):
        out = mark(out, gone(given)) if isinstance(given, Tensor) else out
    return out


@op(
    "clone alias detach _to_copy lift_fresh lift_fresh_copy contiguous positive dropout _conj resolve_conj "
    "resolve_neg lift to_dense",
)
def same(call: Call, x: Value, *_: Any, **__: Any) -> Value:
    """out = x."""
    return Value(x.dims, [x.is_zero(i) for i in range(len(x.dims))])


@same.settled
def _(op: Any, x: Tensor, *_: Any) -> Tensor:
    """Nothing is dropped."""
    return x.clone()


@op(aten.log_sigmoid_forward.default, aten.rrelu_with_noise.default)
def with_buffer(call: Call, x: Value, *args: Any, **_: Any) -> list[Value]:
    """out = f(x), and what its gradient will need."""
    call.broadcast(x, *_values(args))
    return [Value(x.dims, False) if shape == x.shape else None for shape in call.outs]  # type: ignore[misc]


@with_buffer.settled
def _(op: Any, x: Tensor, noise: Tensor, lower: Any = 1 / 8, upper: Any = 1 / 3, *_: Any) -> Any:
    """The slope in the middle, as outside of training."""
    return op(x, noise, lower, upper, False)


@op(aten.glu.default, called="glu")
def glu(call: Call, x: Value, dim: int = -1) -> Value:
    """out = a * sigmoid(b), where x is a and b one after the other."""
    dim %= len(x.dims)
    first, second = split(x.dims[dim], x.dims[dim].size // 2)
    unify(first, second)
    return Value([*x.dims[:dim], resolve(first), *x.dims[dim + 1 :]], x.zero)


@op(aten.native_dropout)
def native_dropout(call: Call, x: Value, *_: Any, **__: Any) -> tuple[Value, Value]:
    """out = x * mask."""
    return same(call, x), Value(x.dims, False)


@native_dropout.settled
def _(op: Any, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Nothing is dropped."""
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


@op(
    "fake_quantize_per_tensor_affine_cachemask.default",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
    "fake_quantize_per_channel_affine_cachemask.default",
    called="fake_quantize_per_tensor_affine fake_quantize_per_channel_affine",
)
def fake_quantized(call: Call, x: Value, scale: Any, zero: Any, *rest: Any) -> tuple[Value, Value]:
    """out = x in whole steps of a scale, one for all or one for each position of an axis; and where x was in range."""
    for each in (scale, zero):
        if isinstance(each, Value) and each.dims and call.op is aten.fake_quantize_per_channel_affine_cachemask.default:
            unify(each.dims[0], x.dims[rest[0]])
    return Value(x.dims, [x.is_zero(i) for i in range(len(x.dims))]), Value(x.dims, False)


@fake_quantized.absent
def _(op: Any, x: Tensor, scale: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    """What is absent has no step that it could be near to."""
    out, inside = op(filled(x), filled(scale, 1.0) if isinstance(scale, Tensor) else scale, *rest)
    return mark(out, gone(x)), inside


@op("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor poisson.default")
def drawn(call: Call, *args: Any, **_: Any) -> Value:
    """Each element drawn around its own place."""
    return Value(call.broadcast(*_values(args)), False)


@drawn.settled
def _(op: Any, mean: Any, std: Any = 0.0, **_: Any) -> Tensor:
    """As far from what is expected, for all elements."""
    return mean + 0.5 * std


@op(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(call: Call, condition: Value, a: Any, b: Any) -> Value:
    """out = a where the condition holds, else b."""
    sides = [v for v in (a, b) if isinstance(v, Value)]
    dims = call.broadcast(condition, *sides)
    zero = [
        len(sides) == 2 and all(_zero_along(v, back, call.shape[back]) for v in sides)
        for back in range(-len(call.shape), 0)
    ]
    return Value(dims, zero)


@where.absent
def _(op: Any, condition: Tensor, a: Any, b: Any) -> Tensor:
    out = op(condition, a, b)
    for side in (a, b):
        out = mark(out, gone(side)) if isinstance(side, Tensor) else out
    return out


@op("isnan isinf isfinite isposinf isneginf")
def tested(call: Call, x: Value) -> Value:
    """Whether each element is a number of some kind."""
    return Value(x.dims, False)


@tested.absent
def _(op: Any, x: Tensor) -> Tensor:
    """What is absent is no reason to complain: code that looks for NaN finds its own only."""
    return op(filled(x))


@op(aten.nan_to_num)
def nan_to_num(call: Call, x: Value, *args: Any, **kwargs: Any) -> Value:
    """out = x, with numbers where there are none."""
    return Value(x.dims, x.zero)


nan_to_num.absent(still_absent)


@op(aten.masked_fill, aten.masked_fill_)
def masked_fill(call: Call, x: Value, mask: Value, value: Any, **_: Any) -> Value:
    """out = value where masked, else x."""
    dims = call.broadcast(x, mask)
    keeps = isinstance(value, int | float) and value == 0
    return Value(dims, [keeps and _zero_along(x, back, call.shape[back]) for back in range(-len(dims), 0)])


masked_fill.absent(still_absent)


@op(aten.copy_, aten.copy)
def copy(call: Call, x: Value, source: Any, *_: Any, **__: Any) -> Value:
    """out = source, in x's place."""
    if not isinstance(source, Value):
        return Value(x.dims, False)
    padded = Value(call.broadcast(x, source), True)
    zero = [_zero_along(source, back, call.shape[back]) for back in range(-len(call.shape), 0)]
    return Value(padded.dims, zero)


copy.absent(still_absent)


@op("fill fill_ bernoulli_ uniform_ normal_ exponential_ cauchy_ geometric_ log_normal_")
def fill(call: Call, x: Value, *args: Any, **_: Any) -> Value:
    """Every element of x becomes a number that does not depend on where it is."""
    return Value(call.broadcast(x, *_values(args)), False)


fill.absent(still_absent)


@fill.settled
def _(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """One draw for all elements; of a choice with two outcomes, how likely one is."""
    if op in (aten.bernoulli_.float, aten.bernoulli_.Tensor):
        return x.copy_(torch.as_tensor(args[0] if args else kwargs.get("p", 0.5)))
    return x.copy_(op(x.new_empty([1]), *args, **kwargs))


@op(aten.zero_, aten.zero)
def zero(call: Call, x: Value, *_: Any, **__: Any) -> Value:
    """Every element of x becomes zero."""
    return Value(x.dims, True)


zero.absent(still_absent)


@op(aten.zeros_like)
def zeros_like(call: Call, x: Value, *_: Any, **__: Any) -> Value:
    """Zeros in x's shape."""
    return Value(x.dims, True)


@op(
    "ones_like full_like empty_like rand_like randn_like randint_like bernoulli",
    called="randint_like",
)
def like(call: Call, x: Value, *args: Any, **_: Any) -> Value:
    """A tensor of x's shape whose elements do not depend on where they are."""
    return Value(call.broadcast(x, *_values(args)), False)


@zeros_like.absent
@like.absent
def _(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    made = op(x, *args, **kwargs)
    return mark(made.zero_() if op is aten.empty_like.default else made, gone(x))  # which may hold NaN by chance


@like.settled
def _(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """One draw for all elements; of a choice with two outcomes, how likely one is."""
    if op in (aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor):
        return x.clone().copy_(torch.as_tensor(args[0])) if args else x.clone()
    one: Tensor = op(x.new_ones([1]), *args, **kwargs)
    return one.expand(x.shape).clone()


@op(aten.view_as_real)
def view_as_real(call: Call, x: Value) -> Value:
    """A complex number becomes a last dimension of two."""
    return Value([*x.dims, call.fixed(2, "real and imaginary part")], [*x.zero, False])


@op(aten.view_as_complex)
def view_as_complex(call: Call, x: Value) -> Value:
    """A last dimension of two becomes a complex number."""
    call.fix(x.dims[-1], "real and imaginary part")
    return Value(x.dims[:-1], x.zero[:-1])
