"""Samples of ops that draw numbers, beside those of their families."""

from __future__ import annotations

from sampling import Draw, Sample, out_sizes, sample, shapes_only

from secateur.compat import aten


@sample(aten.rand.generator, aten.randn.generator)
def rand_from(draw: Draw) -> Sample:
    return shapes_only(out_sizes(*draw.sizes(2)), generator=draw.torch_rng)


@sample(aten.randint.generator)
def randint_from(draw: Draw) -> Sample:
    return shapes_only(9, out_sizes(*draw.sizes(2)), generator=draw.torch_rng)


@sample(aten.randint.low_generator)
def randint_low_from(draw: Draw) -> Sample:
    return shapes_only(2, 9, out_sizes(*draw.sizes(2)), generator=draw.torch_rng)


@sample(aten.randperm.generator)
def randperm_from(draw: Draw) -> Sample:
    return shapes_only(draw.n(), generator=draw.torch_rng)


@sample(aten.cauchy_.default, aten.log_normal_.default)
def spread_out(draw: Draw) -> Sample:
    return shapes_only(draw.x(*draw.sizes(2)))


@sample(aten.geometric_.default)
def geometric(draw: Draw) -> Sample:
    return shapes_only(draw.x(*draw.sizes(2)), 0.5)


@sample(aten.normal.Tensor_float, aten.poisson.default)
def around(draw: Draw) -> Sample:
    return shapes_only(draw.positive(*draw.sizes(2)))


@sample(aten.normal.float_Tensor)
def of_a_width(draw: Draw) -> Sample:
    return shapes_only(0.5, draw.positive(*draw.sizes(2)))


@sample(aten.normal.Tensor_Tensor)
def around_of_a_width(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return shapes_only(draw.x(a, b), draw.positive(b))
