"""Samples of ops that work on each element by itself."""

from __future__ import annotations

from typing import Any

import torch
from sampling import Draw, Sample, call, sample, shapes_only

from secateur.compat import aten, prims


@sample(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.lift.default)
@sample(aten.lift_fresh_copy.default, aten.contiguous.default, aten.positive.default, aten.to_dense.default)
@sample(aten.resolve_conj.default, aten.resolve_neg.default, aten._to_copy.default)
@sample(aten.hardswish.default, aten.real.default, aten.log_sigmoid_forward.default, prims.neg.default)
@sample(aten.zeros_like.default, aten.ones_like.default, aten.zero.default, aten.zero_.default)
def unary(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)))


@sample(aten.imag.default, aten._conj.default, aten.real.default)
def unary_complex(draw: Draw) -> Sample:
    return call(draw.complex(*draw.sizes(2)))


@sample(aten.empty_like.default, aten.rand_like.default, aten.randn_like.default)
@sample(aten.uniform_.default, aten.normal_.default, aten.exponential_.default, aten.bernoulli_.float)
def drawn(draw: Draw) -> Sample:
    return shapes_only(draw.x(*draw.sizes(2)))


@sample(aten.rand_like.generator, aten.randn_like.generator)
def drawn_from(draw: Draw) -> Sample:
    return shapes_only(draw.x(*draw.sizes(2)), generator=draw.torch_rng)


@sample(aten.randint_like.default)
def randint_like(draw: Draw) -> Sample:
    return shapes_only(draw.x(*draw.sizes(2)), 9)


@sample(aten.randint_like.Tensor)
def randint_like_tensor(draw: Draw) -> Sample:
    return shapes_only(draw.x(*draw.sizes(2)), torch.tensor(9))


@sample(aten.randint_like.low_dtype)
def randint_like_low(draw: Draw) -> Sample:
    return shapes_only(draw.x(*draw.sizes(2)), 3, 9)


@sample(aten.randint_like.generator)
def randint_like_from(draw: Draw) -> Sample:
    return shapes_only(draw.x(*draw.sizes(2)), 9, generator=draw.torch_rng)


@sample(aten.randint_like.Tensor_generator)
def randint_like_tensor_from(draw: Draw) -> Sample:
    return shapes_only(draw.x(*draw.sizes(2)), torch.tensor(9), generator=draw.torch_rng)


@sample(aten.randint_like.low_generator_dtype)
def randint_like_low_from(draw: Draw) -> Sample:
    return shapes_only(draw.x(*draw.sizes(2)), 3, 9, generator=draw.torch_rng)


@sample(aten.bernoulli.default)
def bernoulli(draw: Draw) -> Sample:
    return shapes_only(draw.bools(*draw.sizes(2)).double())


@sample(aten.bernoulli.p)
def bernoulli_p(draw: Draw) -> Sample:
    return shapes_only(draw.x(*draw.sizes(2)), 0.5)


@sample(aten.bernoulli.Tensor, aten.bernoulli_.Tensor)
def bernoulli_tensor(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return shapes_only(draw.x(a, b), draw.bools(a, b).double())


@sample(aten.full_like.default, aten.fill.Scalar, aten.fill_.Scalar)
def filled(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)), 1.5)


@sample(aten.fill.Tensor, aten.fill_.Tensor)
def filled_with(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)), draw.x())


@sample(aten.dropout.default, aten.native_dropout.default)
def dropout(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), 0.5, False)


@sample(aten.fake_quantize_per_tensor_affine_cachemask.default)
def fake_quantized(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), 0.1, 3, -8, 7)


@sample(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def fake_quantized_by_tensors(draw: Draw) -> Sample:
    scale, zero, on = torch.tensor(0.1), torch.tensor(3, dtype=torch.int32), torch.tensor(1)
    return call(draw.x(*draw.sizes(3)), scale, zero, on, -8, 7)


@sample(aten.fake_quantize_per_channel_affine_cachemask.default)
def fake_quantized_per_channel(draw: Draw) -> Sample:
    sizes, axis = draw.sizes(3), draw.n(0, 2)
    scale, zero = draw.positive(sizes[axis]).float(), draw.ints(4, sizes[axis]).int()
    return call(draw.x(*sizes), scale, zero, axis, -8, 7)


@sample(aten.rrelu_with_noise.default)
def rrelu(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(a, b))


@sample(aten.glu.default)
def glu(draw: Draw) -> Sample:
    dim = draw.rng.choice([0, 1, -1])
    sizes = draw.sizes(3)
    sizes[dim] *= 2
    return call(draw.x(*sizes), dim)


@sample(aten.hardsigmoid_backward.default, aten.hardswish_backward.default, aten.mish_backward.default)
@sample(prims.add.default, prims.sub.default, prims.mul.default, prims.div.default)
def of_one_shape(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(a, b))


@sample(aten.leaky_relu_backward.default)
def leaky_relu_backward(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(a, b), 0.2, False)


@sample(aten.hardtanh_backward.default, aten.softplus_backward.default)
def between_two(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(a, b), -0.5, 0.5)


@sample(aten.elu_backward.default)
def elu_backward(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), 1.0, 1.0, 1.0, False, draw.x(a, b))


@sample(aten.threshold_backward.default)
def threshold_backward(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(a, b), 0.1)


@sample(aten.log_sigmoid_backward.default)
def of_three(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(a, b), draw.x(a, b))


@sample(aten._prelu_kernel.default)
def prelu(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b, 3), draw.x(1, b, 1))


@sample(aten.floor_divide.default, aten.rsub.Tensor)
def binary(draw: Draw) -> Sample:
    return call(*broadcast_pair(draw, draw.positive))


@sample(aten.floor_divide.Scalar, aten.true_divide.Scalar)
def with_number(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)), 2.0)


@sample(aten.polar.default, aten.complex.default)
def complex_of(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(a, b))


@sample(aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor)
def bits(draw: Draw) -> Sample:
    return call(*broadcast_pair(draw, draw.bools))


@sample(aten.__and__.Scalar, aten.__or__.Scalar, aten.__xor__.Scalar)
def bits_number(draw: Draw) -> Sample:
    return call(draw.ints(8, *draw.sizes(2)), 5)


@sample(aten.where.self)
def where(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    shapes = draw.rng.choice([((a, b), (a, b), (a, b)), ((b,), (a, b), (1, b)), ((a, 1), (b,), (a, b))])
    return call(draw.bools(*shapes[0]), draw.x(*shapes[1]), draw.x(*shapes[2]))


@sample(aten.where.ScalarSelf)
def where_number(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.bools(a, 1), draw.rng.choice([0.0, 1.5]), draw.x(a, b))


@sample(aten.where.ScalarOther)
def where_other_number(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.bools(b), draw.x(a, b), draw.rng.choice([0.0, 1.5]))


@sample(aten.where.Scalar)
def where_numbers(draw: Draw) -> Sample:
    return call(draw.bools(*draw.sizes(2)), 1.5, draw.rng.choice([0.0, 2.5]))


@sample(
    aten.isnan.default,
    aten.isinf.default,
    aten.isfinite.default,
    aten.isposinf.default,
    aten.isneginf.default,
    aten.nan_to_num.default,
)
def number_or_not(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)))


@sample(aten.masked_fill.Scalar)
def masked_fill(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    shape, mask = draw.rng.choice([((a, b), (a, b)), ((a, b), (b,)), ((b,), (a, 1)), ((1, b), (a, b))])
    return call(draw.x(*shape), draw.bools(*mask), draw.rng.choice([0, 0.0, 1.5]))


@sample(aten.masked_fill.Tensor)
def masked_fill_tensor(draw: Draw) -> Sample:
    return call(*masked_fill(draw).args[:2], draw.x())


@sample(aten.masked_fill_.Scalar)
def masked_fill_in_place(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.bools(*draw.rng.choice([(a, b), (b,), (a, 1)])), draw.rng.choice([0, 1.5]))


@sample(aten.masked_fill_.Tensor)
def masked_fill_tensor_in_place(draw: Draw) -> Sample:
    return call(*masked_fill_in_place(draw).args[:2], draw.x())


@sample(aten.copy.default, aten.copy_.default)
def copy(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(*draw.rng.choice([(a, b), (b,), (a, 1)])))


@sample(aten.copy_.int, aten.copy_.float)
def copy_plain_number(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)), 2)


@sample(aten.copy_.Tensor)
def copy_number(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)), draw.x())


@sample(aten.view_as_real.default)
def view_as_real(draw: Draw) -> Sample:
    return call(draw.complex(*draw.sizes(2)))


@sample(aten.view_as_complex.default)
def view_as_complex(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2), 2))


def broadcast_pair(draw: Draw, make: Any) -> tuple[Any, Any]:
    a, b = draw.sizes(2)
    left, right = draw.rng.choice([((a, b), (a, b)), ((a, b), (b,)), ((a, 1), (b,)), ((1, b), (a, b)), ((a, b), ())])
    return make(*left), make(*right)
