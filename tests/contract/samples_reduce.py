"""Samples of ops that reduce, rank, pick or create."""

from __future__ import annotations

from typing import Any

import torch
from sampling import Draw, Sample, call, out_size, out_sizes, sample, shapes_only

from secateur.compat import aten


def _dim(draw: Draw) -> int:
    return draw.rng.choice([0, 1, -1])


def _flag(draw: Draw) -> bool:
    return draw.rng.random() < 0.5


@sample(aten.sum.dim_IntList, aten.nansum.default, aten.mean.dim, aten.amax.default, aten.amin.default)
def over_some(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), draw.rng.choice([[1], [0, -1], [2]]), _flag(draw))


@sample(aten.logsumexp.default)
def logsumexp(draw: Draw) -> Sample:
    return over_some(draw)


@sample(
    aten.sum.default,
    aten.mean.default,
    aten.max.default,
    aten.min.default,
    aten.prod.default,
    aten.all.default,
    aten.any.default,
    aten.nansum.default,
    aten.norm.Scalar,
    aten.linalg_vector_norm.default,
)
def over_all(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)))


@sample(aten.median.default, aten.nanmedian.default)
def in_the_middle(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)))


@sample(aten.aminmax.default)
def least_and_most(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)))


@sample(aten.aminmax.default)
def least_and_most_along(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)), dim=1, keepdim=_flag(draw))


@sample(aten.dist.default)
def distance(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(b), draw.rng.choice([1.0, 2.0]))


@sample(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
def loss(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(a, b), draw.rng.choice([0, 2]))


@sample(aten.mse_loss.default)
def mean_loss(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.x(b), draw.rng.choice([0, 1, 2]))


@sample(aten._is_all_true.default, aten._is_any_true.default)
def truth(draw: Draw) -> Sample:
    return call(draw.bools(*draw.sizes(2)))


@sample(aten.count_nonzero.default)
def count_nonzero(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), draw.rng.choice([None, 1]))


@sample(aten.linalg_vector_norm.default)
def vector_norm(draw: Draw) -> Sample:
    order = draw.rng.choice([2, 1, 3.5, 0, float("inf"), -float("inf"), -1])
    return call(draw.x(*draw.sizes(3)), order, draw.rng.choice([[1], [0, 2]]), _flag(draw))


@sample(aten.norm.ScalarOpt_dim)
def norm(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), draw.rng.choice([2, 1, -1, -float("inf"), None]), [1], _flag(draw))


@sample(aten.renorm.default)
def renorm(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), draw.rng.choice([2, 1, 3.5]), draw.rng.choice([0, 1, -1]), 0.7)


@sample(aten.embedding_renorm_.default)
def embedding_renorm(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.ints(a, 3), 0.7, 2.0)


@sample(aten.norm.Scalar)
def norm_all(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), draw.rng.choice([2, 1, -1]))


@sample(aten.norm.ScalarOpt_dim_dtype)
def norm_dtype(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), 2, [1], _flag(draw), dtype=torch.float64)


@sample(aten._cdist_forward.default)
def distances(draw: Draw) -> Sample:
    n, a, b, k = draw.sizes(4)
    return call(draw.x(n, a, k), draw.x(n, b, k), draw.rng.choice([2.0, 1.0, 3.5, float("inf")]), None)


@sample(aten._euclidean_dist.default)
def euclidean_distances(draw: Draw) -> Sample:
    a, b, k = draw.sizes(3)
    return call(draw.x(a, k), draw.x(b, k))


@sample(aten.prod.dim_int, aten.all.dim, aten.any.dim)
def over_one(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), _dim(draw), _flag(draw))


@sample(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def spread(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), draw.rng.choice([[1], [0, 2], None]), correction=0, keepdim=_flag(draw))


@sample(aten._softmax.default, aten._log_softmax.default)
def softmax(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), _dim(draw), False)


@sample(aten._safe_softmax.default, aten.softmax.int, aten.log_softmax.int, aten.cumsum.default)
@sample(aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default)
def along(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), _dim(draw))


@sample(aten.max.dim, aten.min.dim, aten.median.dim, aten.mode.default)
def ranked(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), _dim(draw), *([True] if _flag(draw) else []))


@sample(aten.mode.default)
def mode_of_the_last(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)))


@sample(aten.kthvalue.default)
def kthvalue(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), 2, *draw.rng.choice([(), (0,), (1, True)]))


@sample(aten.argmax.default, aten.argmin.default)
def argmax(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), *draw.rng.choice([(), (1,), (-1, True)]))


@sample(aten.sort.default, aten.argsort.default)
def sort(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), *draw.rng.choice([(), (0,), (1, True)]))


@sample(aten.sort.stable, aten.argsort.stable)
def sort_stable(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), stable=True, **draw.rng.choice([{}, {"dim": 0}, {"dim": 1}]))


@sample(aten.topk.default)
def topk(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), 2, *draw.rng.choice([(), (0,)]))


@sample(aten.histc.default)
def histc(draw: Draw) -> Sample:
    return call(draw.x(6), 4)


@sample(aten.bincount.default)
def bincount(draw: Draw) -> Sample:
    weights = [draw.x(6)] if _flag(draw) else []
    return call(draw.ints(4, 6), *weights)


@sample(aten._fft_c2c.default)
def fft_c2c(draw: Draw) -> Sample:
    return call(draw.complex(*draw.sizes(3)), [1], 0, True)


@sample(aten._fft_r2c.default)
def fft_r2c(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), [2], 0, True)


@sample(aten._fft_c2r.default)
def fft_c2r(draw: Draw) -> Sample:
    n = draw.n()
    return call(draw.complex(*draw.sizes(2), n), [2], 0, 2 * (n - 1))


# Picking by number ----------------------------------------------------------------------------------------


@sample(aten.embedding.default)
def embedding(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)), draw.ints(2, *draw.sizes(2)))


@sample(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(draw: Draw) -> Sample:
    mode = draw.rng.choice([0, 1, 2])
    table = draw.x(5, draw.n())
    weights = draw.x(6) if mode == 0 and _flag(draw) else None
    return call(table, draw.ints(5, 6), torch.tensor([0, 2, 3]), False, mode, False, weights)


@sample(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    which: list[Any] = draw.rng.choice([
        [None, draw.ints(b, 4)],
        [draw.ints(a, 2, 3)],
        [draw.ints(a, 3, 1), draw.ints(b, 1, 4)],
        [draw.ints(a, 3), None, draw.ints(c, 3)],
    ])  # fmt: skip
    return call(draw.x(a, b, c), which)


@sample(aten.index.Tensor)
def index_by_mask(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    return call(draw.x(a, b, c), draw.rng.choice([[draw.bools(a, b)], [None, draw.bools(b)]]))


@sample(aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default)
def index_put(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    which, values = draw.rng.choice([
        ([torch.arange(2)], draw.x(2, b, c)),
        ([torch.arange(2)], draw.x(c)),
        ([None, torch.arange(2)], draw.x(a, 2, c)),
        ([None, torch.arange(2)], draw.x(a, 1, 1)),
        ([torch.arange(2), torch.arange(2)], draw.x(2, c)),
        ([torch.arange(2), None, torch.arange(2)], draw.x(2, b)),
        ([torch.tensor([[0], [1]]), torch.tensor([[0, 1]])], draw.x(2, 2, c)),
        ([draw.bools(a, b)], torch.tensor(1.5, dtype=torch.float64)),
        ([draw.bools(a)], torch.tensor(1.5, dtype=torch.float64)),
    ])  # fmt: skip
    return call(draw.x(a, b, c), which, values)


@sample(aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default)
def index_put_by_mask(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    mask = torch.arange(a) < 2
    return call(draw.x(a, b), [mask], draw.x(2, b))


@sample(aten.index_select.default)
def index_select(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), _dim(draw), draw.ints(2, draw.n()))


@sample(aten.index_select.default)
def index_select_one(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), _dim(draw), torch.tensor(1))


@sample(aten.gather.default)
def gather(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    rows = draw.rng.choice([a, a - 1])
    return call(draw.x(a, b, c), draw.rng.choice([1, -2]), draw.ints(b, rows, draw.n(), c))


def _scatter(draw: Draw) -> tuple[Any, int, Any, Any]:
    a, b, c = draw.sizes(3)
    rows = draw.rng.choice([a, a - 1])
    which = torch.arange(2).reshape(1, 2, 1).expand(rows, 2, c).contiguous()
    return draw.x(a, b, c), draw.rng.choice([1, -2]), which, draw.x(a, draw.n(2, 3), c)


@sample(aten.scatter.src, aten.scatter_add.default)
def scatter(draw: Draw) -> Sample:
    return call(*_scatter(draw))


@sample(aten.scatter.value)
def scatter_value(draw: Draw) -> Sample:
    return call(*_scatter(draw)[:3], draw.rng.choice([0.0, 1.5]))


@sample(aten.scatter.reduce)
def scatter_reduced(draw: Draw) -> Sample:
    return call(*_scatter(draw), reduce="multiply")


@sample(aten.scatter.value_reduce)
def scatter_value_reduced(draw: Draw) -> Sample:
    return call(*_scatter(draw)[:3], 1.5, reduce="add")


@sample(aten.scatter_reduce.two)
def scatter_reduce(draw: Draw) -> Sample:
    return call(*_scatter(draw), draw.rng.choice(["sum", "amax", "mean"]), include_self=_flag(draw))


@sample(aten.index_add.default, aten.index_copy.default)
def index_add(draw: Draw) -> Sample:
    a, b, c = draw.sizes(3)
    return call(draw.x(a, b, c), draw.rng.choice([1, -2]), torch.arange(2), draw.x(a, 2, c))


@sample(aten.index_reduce.default)
def index_reduce(draw: Draw) -> Sample:
    return call(*index_add(draw).args, draw.rng.choice(["prod", "amax", "mean"]))


@sample(aten.index_fill.int_Scalar)
def index_fill(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), _dim(draw), torch.arange(2), 1.5)


@sample(aten.index_fill.int_Tensor)
def index_fill_tensor(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(3)), _dim(draw), torch.arange(2), torch.tensor(1.5).double())


@sample(aten.nonzero.default, aten._unique2.default, aten.unique_consecutive.default)
def found(draw: Draw) -> Sample:
    return call(draw.ints(3, *draw.sizes(2)))


@sample(aten.masked_select.default)
def masked_select(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return call(draw.x(a, b), draw.bools(*draw.rng.choice([(a, b), (b,)])))


@sample(aten.searchsorted.Tensor)
def searchsorted(draw: Draw) -> Sample:
    a = draw.n()
    return call(draw.x(a, 6).sort().values, draw.x(a, 4))


@sample(aten.bucketize.Tensor)
def bucketize(draw: Draw) -> Sample:
    return call(draw.x(*draw.sizes(2)), draw.x(4).sort().values)


# Creating -------------------------------------------------------------------------------------------------


@sample(aten.zeros.default, aten.ones.default, aten._efficientzerotensor.default)
def created(draw: Draw) -> Sample:
    return call(out_sizes(*draw.sizes(2)))


@sample(aten.full.default)
def full(draw: Draw) -> Sample:
    return call(out_sizes(*draw.sizes(2)), 1.5)


@sample(aten.rand.default, aten.randn.default, aten.empty.memory_format)
def drawn(draw: Draw) -> Sample:
    return shapes_only(out_sizes(*draw.sizes(2)))


@sample(aten.randint.default)
def randint(draw: Draw) -> Sample:
    return shapes_only(9, out_sizes(*draw.sizes(2)))


@sample(aten.randint.low)
def randint_low(draw: Draw) -> Sample:
    return shapes_only(3, 9, out_sizes(*draw.sizes(2)))


@sample(aten.empty_strided.default)
def empty_strided(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return shapes_only(out_sizes(a, b), [out_size(b, 1), 1])


@sample(aten.new_zeros.default, aten.new_ones.default)
def new(draw: Draw) -> Sample:
    return call(draw.x(3), out_sizes(*draw.sizes(2)))


@sample(aten.new_full.default)
def new_full(draw: Draw) -> Sample:
    return call(draw.x(3), out_sizes(*draw.sizes(2)), 1.5)


@sample(aten.new_empty.default)
def new_empty(draw: Draw) -> Sample:
    return shapes_only(draw.x(3), out_sizes(*draw.sizes(2)))


@sample(aten.new_empty_strided.default)
def new_empty_strided(draw: Draw) -> Sample:
    a, b = draw.sizes(2)
    return shapes_only(draw.x(3), out_sizes(a, b), [out_size(b, 1), 1])


@sample(aten.scalar_tensor.default)
def scalar_tensor(draw: Draw) -> Sample:
    return call(1.5)


@sample(aten.arange.default, aten.randperm.default, aten.eye.default, aten.hann_window.default)
def counted(draw: Draw) -> Sample:
    return shapes_only(draw.n())


@sample(aten.arange.start)
def arange_start(draw: Draw) -> Sample:
    return call(1, 2 + draw.n())


@sample(aten.arange.start_step)
def arange_step(draw: Draw) -> Sample:
    return call(1, 9, 2)


@sample(aten.linspace.default, aten.logspace.default)
def linspace(draw: Draw) -> Sample:
    return call(0.0, 1.0, draw.n())


@sample(aten.eye.m)
def eye(draw: Draw) -> Sample:
    return call(*draw.sizes(2))


@sample(aten.tril_indices.default, aten.triu_indices.default)
def triangle_indices(draw: Draw) -> Sample:
    return call(*draw.sizes(2))


@sample(aten.one_hot.default)
def one_hot(draw: Draw) -> Sample:
    return call(draw.ints(4, *draw.sizes(2)), 4)
