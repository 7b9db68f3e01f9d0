"""Samples of ops that move, merge, split or repeat dimensions."""

from __future__ import annotations

from commutation import Seen, SizeOf
from sampling import Draw, Sample, bound, call, out_size, out_sizes, sample

from secateur.axes import Layout, factor, pieces
from secateur.compat import aten


@sample(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def merge(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    return call(draw.x(a, b, c), out_sizes(a, b * c))


@sample(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def unmerge(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    return call(draw.x(a * b, c), out_sizes(a, b, c))


@sample(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def regroup(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    return call(draw.x(a * b, c, 1), out_sizes(a, b * c))


@sample(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def no_common_refinement(draw: Draw) -> Sample:
    n = draw.n()
    return call(draw.x(n, 4, 3), [out_size(n, 0), 3, 4])


@sample(aten._reshape_alias.default)
def reshape_alias(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), out_sizes(a * b), [1])


@sample(aten.permute.default)
def permute(draw: Draw) -> Sample:
    order = [0, 1, 2, 3]
    draw.rng.shuffle(order)
    return call(draw.x(*draw.sizes(4)), order)


@sample(aten.transpose.int, aten.swapaxes.default)
def transpose(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), draw.rng.choice([0, -3]), draw.rng.choice([1, -1]))


@sample(aten.t.default, aten.numpy_T.default, aten.adjoint.default, aten.mT.default)
def t(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)))


@sample(aten.numpy_T.default)
def numpy_t(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)))


@sample(aten.adjoint.default, aten.mT.default)
def matrices(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)))


@sample(aten.t.default)
def vector_t(draw: Draw) -> Sample:
    return call(draw.x(draw.n()))


@sample(aten.unsqueeze.default)
def unsqueeze(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)), draw.rng.choice([-3, -1, 0, 1, 2]))


@sample(aten.squeeze.default)
def squeeze(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, 1, b, 1))


@sample(aten.squeeze.dim)
def squeeze_dim(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, 1, b, 1), draw.rng.choice([0, 1, -1]))


@sample(aten.squeeze.dims)
def squeeze_dims(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, 1, b, 1), [0, -1])


@sample(aten.expand.default)
def expand(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    return call(draw.x(b, 1), out_sizes(a, b, c))


@sample(aten.repeat.default)
def repeat(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    counts = [draw.n(1, 3) for _ in range(3)]

    def times(i: int, n: int) -> SizeOf:
        return SizeOf(n, lambda seen: factor(seen.outputs[0].dims[i], n)[0])

    return call(draw.x(a, b), [times(i, n) for i, n in enumerate(counts)])


@sample(aten.repeat_interleave.self_int)
def repeat_interleave(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    dim = draw.rng.choice([0, 1, -1, None])
    n = draw.n(1, 3)
    size = a * b if dim is None else (a, b)[dim]
    count = SizeOf(n, lambda seen: factor(seen.outputs[0].dims[dim or 0], size)[1])
    return call(draw.x(a, b), count, dim)


@sample(aten.slice.Tensor)
def slice_(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    n = a + b + c
    return call(draw.x(2, n, 3), 1, bound(a, 0, 1), bound(a + b, 0, 1))


@sample(aten.slice.Tensor)
def slice_to_the_end(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a + b, 3), 0, bound(a, 0, 0), 2**63 - 1)


@sample(aten.slice.Tensor)
def slice_from_behind(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a + b, 3), 0, SizeOf(-b, lambda seen: pieces(seen.inputs[0].dims[0], [a, b])[1]))


@sample(aten.slice.Tensor)
def every_second(draw: Draw) -> Sample:
    return call(draw.x(2 * draw.n(), 3), 0, draw.rng.choice([0, 1]), 2**63 - 1, 2)


@sample(aten.slice.Tensor)
def every_third_of_a_rest(draw: Draw) -> Sample:
    return call(draw.x(3 * draw.n() + 1, 3), 0, draw.rng.choice([0, 1]), 2**63 - 1, 3)


@sample(aten.select.int)
def select(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    return call(draw.x(a, b, c), draw.rng.choice([1, -2]), bound(draw.rng.randrange(b), 0, 1))


@sample(aten.unbind.int)
def unbind(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), draw.rng.choice([0, 1, -1]))


@sample(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor)
def split(draw: Draw) -> Sample:
    n, a = draw.sizes(2)
    parts = SizeOf(n, lambda seen: [out.dims[1] for out in seen.outputs])
    return call(draw.x(a, 3 * n), parts, draw.rng.choice([1, -1]))


@sample(aten.split_with_sizes.default, aten.split_with_sizes_copy.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(draw: Draw) -> Sample:
    sizes = draw.sizes(3)
    parts = [out_size(n, 1, out=i) for i, n in enumerate(sizes)]
    return call(draw.x(draw.n(), sum(sizes)), parts, draw.rng.choice([1, -1]))


@sample(aten.cat.default)
def cat(draw: Draw) -> Sample:
    a, b, c, d = draw.sizes(4)
    return call([draw.x(a, b, c), draw.x(a, d, c), draw.x(a, b, c)], draw.rng.choice([1, -2]))


@sample(aten.cat.default)
def cat_with_nothing(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call([draw.x(0), draw.x(a, b), draw.x(1, b)])


@sample(aten.stack.default)
def stack(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call([draw.x(a, b) for _ in range(3)], draw.rng.choice([0, 1, 2, -1]))


@sample(aten.flip.default)
def flip(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), [draw.rng.choice([0, -1])])


@sample(aten.rot90.default)
def rot90(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(4)), draw.rng.choice([1, 2, 3, -1]), draw.rng.choice([[2, 3], [0, -1]]))


@sample(aten.roll.default)
def roll(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), [1], [draw.rng.choice([0, -1])])


@sample(aten.roll.default)
def roll_flat(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)), [1])


@sample(aten.unfold.default)
def unfold(draw: Draw) -> Sample:
    return call(draw.x(draw.n(), 6, draw.n()), draw.rng.choice([1, -2]), 2, draw.n(1, 2))


@sample(aten.as_strided.default, aten.as_strided_.default)
def as_strided(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), [b, a], [1, b])


@sample(aten.as_strided.default, aten.as_strided_.default)
def as_strided_again(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    width = SizeOf(b, lambda seen: seen.outputs[0].dims[1])
    return call(draw.x(a, b), out_sizes(a, b), [width, 1])


@sample(aten.diagonal.default)
def diagonal(draw: Draw) -> Sample:
    n = draw.n()
    return call(draw.x(n, draw.n(), n), 0, 0, -1)


@sample(aten.diagonal.default)
def off_diagonal(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), draw.rng.choice([-1, 1]), 1, 2)


@sample(aten.tril.default, aten.triu.default)
def triangle(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), draw.rng.choice([-1, 0, 1]))


@sample(aten.constant_pad_nd.default)
def pad(draw: Draw) -> Sample:
    sizes = draw.sizes(3)
    widths = [draw.n(0, 3) for _ in range(4)]
    return call(draw.x(*sizes), _pad_sizes(sizes, widths), draw.rng.choice([0.0, 1.5]))


@sample(aten.constant_pad_nd.default)
def crop(draw: Draw) -> Sample:
    n = draw.n(4, 6)
    return call(draw.x(3, n), _pad_sizes([3, n], [-2, draw.n(0, 2)]))


def _pad_sizes(sizes: list[int], widths: list[int]) -> list[SizeOf]:
    """Widths before and after, from the last dimension on: pieces of the output, or of the input if they crop."""

    def size(i: int, width: int) -> SizeOf:
        dim = len(sizes) - 1 - i // 2

        def piece(seen: Seen) -> Layout:
            layout = (seen.outputs if width >= 0 else seen.inputs)[0].dims[dim]
            rest = layout.size - abs(width)
            return pieces(layout, [rest, abs(width)])[1] if i % 2 else pieces(layout, [abs(width), rest])[0]

        return SizeOf(width, piece)

    return [size(i, width) for i, width in enumerate(widths)]


@sample(aten.reflection_pad1d.default, aten.replication_pad1d.default)
def pad_1d(draw: Draw) -> Sample:
    return call(draw.x(draw.n(), draw.n(), 4), [1, 2])


@sample(aten.reflection_pad2d.default, aten.replication_pad2d.default)
def pad_2d(draw: Draw) -> Sample:
    return call(draw.x(draw.n(), draw.n(), 4, 3), [1, 2, 0, 1])


@sample(aten.reflection_pad3d.default, aten.replication_pad3d.default)
def pad_3d(draw: Draw) -> Sample:
    return call(draw.x(draw.n(), draw.n(), 3, 4, 3), [1, 2, 0, 1, 1, 1])
