"""Products over an axis in every spelling, and what makes a sum over removed positions exact."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Linear

from oracle import Net, axes_at, axis_at, proved, reason, sizes_at, tied, weight

X = torch.randn(2, 6)
SEQUENCE = torch.randn(2, 5, 6)


@pytest.mark.parametrize(
    "product",
    [
        lambda n, x: x @ n.u @ n.v,
        lambda n, x: torch.matmul(torch.mm(x, n.u), n.v),
        lambda n, x: torch.einsum("bi,ih,ho->bo", x, n.u, n.v),
        lambda n, x: torch.einsum(x, [0, 1], n.u, [1, 2], n.v, [2, 3], [0, 3]),
        lambda n, x: torch.einsum("...i,ih->...h", x, n.u) @ n.v,
        lambda n, x: torch.tensordot(torch.tensordot(x, n.u, 1), n.v, dims=([1], [0])),
        lambda n, x: F.linear(F.linear(x, n.u.t()), n.v.T),
        lambda n, x: torch.addmm(n.b, torch.addmm(n.c, x, n.u, beta=2), n.v),
        lambda n, x: torch.stack([torch.mv(n.v.t(), torch.mv(n.u.t(), row)) for row in x]),
        lambda n, x: torch.bmm(x[None] @ n.u, n.v[None])[0],
        lambda n, x: torch.baddbmm(n.b, x[None] @ n.u, n.v[None])[0],
        lambda n, x: (x[:, :, None] * n.u).sum(1) @ n.v,
        lambda n, x: ((x @ n.u)[:, :, None] * n.v).sum(1),
        lambda n, x: torch.linalg.multi_dot([x, n.u, n.v]),
        lambda n, x: n.v.t().matmul(x.matmul(n.u).t()).t(),
        lambda n, x: torch.inner(x @ n.u, n.v.t()),
    ],
    ids=["@", "mm", "einsum", "einsum by numbers", "einsum with dots", "tensordot", "linear", "addmm", "mv", "bmm",
         "baddbmm", "sum of products", "product then sum", "multi_dot", "transposed", "inner"],
)  # fmt: skip
def test_a_parameter_multiplied_in_every_spelling(product):
    net = Net(product, u=weight(6, 8), v=weight(8, 3), b=weight(3), c=weight(8))
    graph = proved(net, X)
    assert tied(graph, ("u", 1), ("v", 0))
    assert axis_at(graph, "u", 1).exact
    assert reason(graph, "v", 1) == "a dimension of the model's output"


@pytest.mark.parametrize(
    "product",
    [
        lambda n, x: torch.einsum("bsi,ihd,hdo->bso", x, n.u, n.v),
        lambda n, x: torch.einsum("bshd,hdo->bso", torch.einsum("bsi,ihd->bshd", x, n.u), n.v),
        lambda n, x: torch.einsum("b s i, i h d -> b h s d", x, n.u).transpose(1, 2).flatten(2) @ n.v.flatten(0, 1),
        lambda n, x: torch.tensordot(torch.tensordot(x, n.u, dims=1), n.v, dims=2),
        lambda n, x: (x @ n.u.flatten(1)) @ n.v.flatten(0, 1),
    ],
    ids=["three at once", "two steps", "spaces", "tensordot", "flattened"],
)
def test_weights_of_three_dimensions(product):
    graph = proved(Net(product, u=weight(6, 2, 4), v=weight(2, 4, 3)), SEQUENCE)
    assert tied(graph, ("u", 1), ("v", 0))
    assert tied(graph, ("u", 2), ("v", 1))


def test_a_batched_product_ties_the_batch():
    net = Net(
        lambda n, x: torch.bmm((n.a(x).view(2, n.e, -1)).transpose(0, 1), n.w).sum(0),
        a=Linear(6, 12),
        w=weight(3, 4, 5),
        e=3,
    )
    graph = proved(net, X)
    assert sizes_at(graph, "a.weight") == [3, 4]
    assert tied(graph, ("w", 0))
    assert axes_at(graph, "w", 0) == axes_at(graph, "a.weight")[:1]


def test_a_product_that_broadcasts_its_batch():
    net = Net(
        lambda n, x: (n.a(x).view(2, 5, n.h, -1).transpose(1, 2) @ n.w).transpose(1, 2).flatten(2) @ n.o,
        a=Linear(6, 8), w=weight(2, 4, 3), o=weight(6, 2), h=2,
    )  # fmt: skip
    graph = proved(net, SEQUENCE)
    assert sizes_at(graph, "a.weight") == [2, 4]
    assert sizes_at(graph, "o", 0) == [2, 3]


def test_a_bilinear_form():
    net = Net(
        lambda n, x: n.o(F.bilinear(n.a(x), n.b(x), n.w, n.c)),
        a=Linear(6, 4),
        b=Linear(6, 5),
        w=weight(7, 4, 5),
        c=weight(7),
        o=Linear(7, 2),
    )
    graph = proved(net, X)
    assert tied(graph, ("a.weight", 0), ("w", 1))
    assert tied(graph, ("b.weight", 0), ("w", 2))
    assert tied(graph, ("w", 0), ("c", 0), ("o.weight", 1))


def test_the_bilinear_module():
    graph = proved(
        Net(lambda n, x: n.o(n.m(n.a(x), n.a(x))), a=Linear(6, 4), m=nn.Bilinear(4, 4, 5), o=Linear(5, 2)), X
    )
    assert tied(graph, ("a.weight", 0), ("m.weight", 1), ("m.weight", 2))


def test_a_gram_matrix_with_itself():
    net = Net(lambda n, x: n.o((n.a(x).mT @ n.a(x)).flatten(1)), a=Linear(6, 4), o=Linear(16, 2))
    graph = proved(net, SEQUENCE)
    assert tied(graph, ("a.weight", 0), ("o.weight", 1))


def test_an_outer_product_is_both_axes():
    net = Net(
        lambda n, x: (n.o(torch.outer(n.p, n.q).flatten()) + x).sum(0),
        p=weight(4),
        q=weight(5),
        o=Linear(20, 6),
    )
    graph = proved(net, X)
    assert sizes_at(graph, "o.weight", 1) == [4, 5]


def test_a_kronecker_product():
    graph = proved(
        Net(
            lambda n, x: torch.kron(n.p, n.q) @ n.w + n.c(x),
            p=weight(1, 4),
            q=weight(1, 5),
            w=weight(20, 3),
            c=Linear(6, 3),
        ),
        X,
    )
    assert sizes_at(graph, "w", 0) == [4, 5]


@pytest.mark.parametrize(
    ("between", "exact"),
    [
        (torch.relu, True), (F.gelu, True), (torch.tanh, True), (F.silu, True), (lambda h: h * 3, True),
        (torch.sigmoid, False), (torch.cos, False), (lambda h: h + 1, False), (F.softplus, False), (torch.exp, False),
        (lambda h: h.clamp(min=0.1), False), (lambda h: h.clamp(min=-0.1), True), (F.logsigmoid, False),
        (lambda h: h.masked_fill(h > 0, 0), True), (lambda h: h.masked_fill(h > 0, 1), False),
        (lambda h: h.sigmoid().masked_fill(h > 0, 0), False), (lambda h: torch.where(h > 0, h, 1.0), False),
        (lambda h: torch.where(h > 0, h, h * 2), True), (lambda h: h.pow(2), True), (lambda h: h.abs() ** 0, False),
        (lambda h: h / 3, True), (lambda h: 3 / (h + 9), False), (lambda h: h.fill_(1.0), False),
        (lambda h: h == 0, False),
        (lambda h: torch.zeros_like(h), True), (lambda h: torch.ones_like(h), False), (lambda h: h.cumsum(-1), False),
    ],
)  # fmt: skip
def test_a_sum_is_exact_only_when_removed_positions_come_out_as_zero(between, exact):
    net = Net(lambda n, x: between(n.a(x)).sum(1, keepdim=True) + n.b(x), a=Linear(6, 8), b=Linear(6, 3))
    axis = axis_at(proved(net, X), "a.weight")
    assert axis.exact is exact
    assert exact or "not zero" in axis.why
    net = Net(lambda n, x: n.b(between(n.a(x)).to(x.dtype)), a=Linear(6, 8), b=Linear(8, 3))
    assert axis_at(proved(net, X), "a.weight").exact or "cumsum" in axis.why


@pytest.mark.parametrize(
    ("statistic", "exact"),
    [
        (lambda h: h.sum(1, keepdim=True), True), (lambda h: h.norm(dim=1, keepdim=True), True),
        (lambda h: F.normalize(h, dim=1).sum(1, keepdim=True), True), (lambda h: h.mean(1, keepdim=True), False),
        (lambda h: h.amax(1, keepdim=True), False), (lambda h: h.var(1, keepdim=True), False),
        (lambda h: h.prod(1, keepdim=True), False), (lambda h: h.logsumexp(1, keepdim=True), False),
        (lambda h: h.softmax(1)[:, :1], False), (lambda h: h.std(1, keepdim=True), False),
        (lambda h: torch.linalg.vector_norm(h, ord=float("inf"), dim=1, keepdim=True), True),
        (lambda h: F.cosine_similarity(h, h + h.relu(), dim=1)[:, None], True),
        (lambda h: h.sum() / h.numel(), False), (lambda h: h.mean(), False),
    ],
)  # fmt: skip
def test_which_statistics_ignore_what_is_zero(statistic, exact):
    net = Net(lambda n, x: statistic(n.a(x)) + n.b(x), a=Linear(6, 8), b=Linear(6, 3))
    graph = proved(net, X)
    assert all(axis.exact is exact for axis in graph.axes)
    assert graph.axes


@pytest.mark.parametrize(
    "pick",
    [
        lambda h: h.max(1)[0],
        lambda h: h.argmax(1).to(h.dtype),
        lambda h: h.topk(2, 1)[0].sum(1),
        lambda h: h.sort(-1)[0][:, 0],
        lambda h: h.median(dim=1).values,
    ],
)
def test_answers_that_name_a_position_block_it(pick):
    graph = proved(Net(lambda n, x: pick(n.a(x))[:, None] + n.b(x), a=Linear(6, 8), b=Linear(6, 3)), X)
    assert axes_at(graph, "a.weight") == []


def test_a_weight_that_is_an_activation_too():
    net = Net(
        lambda n, x: n.b(x @ n.a.weight.t()) + n.c(n.a.weight).sum(0),
        a=Linear(6, 8),
        b=Linear(8, 3),
        c=Linear(6, 3, bias=False),
    )
    assert axis_at(proved(net, X), "a.weight").exact
    net = Net(
        lambda n, x: n.b(x @ n.a.weight.t()) + n.c(n.a.weight).sum(0),
        a=Linear(6, 8),
        b=Linear(8, 3),
        c=Linear(6, 3),
    )
    assert not axis_at(proved(net, X), "a.weight").exact, "the bias of c is added once per row"


@pytest.mark.parametrize(
    "given", [lambda w: w.data, lambda w: w.detach(), lambda w: nn.Parameter(w), lambda w: w.clone()]
)
def test_a_weight_read_past_autograd_is_still_that_weight(given):
    net = Net(
        lambda n, x: n.c(n.b(x) * given(n.a.bias)) + n.d(n.a(x)),
        a=Linear(6, 8),
        b=Linear(6, 8),
        c=Linear(8, 3),
        d=Linear(8, 3),
    )
    assert tied(proved(net, X), ("a.weight", 0), ("b.weight", 0))


@pytest.mark.parametrize(
    "given",
    [lambda w: torch.tensor(w.tolist(), dtype=w.dtype), lambda w: torch.from_numpy(w.detach().numpy())],
)
def test_elements_that_leave_torch_block(given):
    net = Net(
        lambda n, x: n.c(n.b(x) * given(n.a.bias)) + n.d(n.a(x)),
        a=Linear(6, 8),
        b=Linear(6, 8),
        c=Linear(8, 3),
        d=Linear(8, 3),
    )
    assert "leave torch" in reason(proved(net, X), "a.weight")


def test_ops_without_a_rule_block_and_are_named():
    graph = proved(
        Net(
            lambda n, x: n.b(torch.linalg.inv(n.m) @ n.a(x).t()).t(),
            a=Linear(6, 8),
            m=weight(8, 8),
            b=Linear(2, 2),
        ),
        X,
        run_inexact=False,
    )
    assert any("linalg_inv" in name for name in graph.unknown)
    assert "no rule for this op" in reason(graph, "m")
