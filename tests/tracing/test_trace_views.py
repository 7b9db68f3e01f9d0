"""Reshapes, permutations, repeats and expansions: products of axes, and where sizes come from."""

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Linear

from oracle import Net, axes_at, axis_at, proved, reason, sizes_at, tied, weight
from secateur.axes import why_fixed
from secateur.sizes.explain import Explainer

X = torch.randn(2, 6)
SEQUENCE = torch.randn(2, 5, 6)


@pytest.mark.parametrize(
    "swap",
    [
        lambda n, h: h.view(2, n.h, n.d).transpose(1, 2).reshape(2, -1),
        lambda n, h: h.reshape(h.shape[0], n.h, h.shape[1] // n.h).permute(0, 2, 1).flatten(1),
        lambda n, h: h.unflatten(1, (n.h, n.d)).mT.flatten(-2),
        lambda n, h: h.unflatten(-1, (n.h, -1)).swapaxes(-1, -2).reshape(2, n.d * n.h),
        lambda n, h: h.view(-1, n.h, n.d).movedim(1, 2).contiguous().view(-1, n.h * n.d),
        lambda n, h: einops.rearrange(h, "b (h d) -> b (d h)", h=n.h),
        lambda n, h: einops.rearrange(h, "b (h d) -> b (d h)", d=n.d),
        lambda n, h: torch.einsum("bhd->bdh", h.view(h.shape[0], n.h, -1)).reshape(h.size()),
    ],
    ids=["view", "from shape", "unflatten", "minus one", "movedim", "einops h", "einops d", "einsum"],
)
def test_a_permuted_product_in_every_spelling(swap):
    net = Net(lambda n, x: n.b(swap(n, n.a(x))), a=Linear(6, 12), b=Linear(12, 3), h=3, d=4)
    graph = proved(net, X)
    heads, dims = axes_at(graph, "a.weight")
    assert (heads.size, dims.size) == (3, 4)
    assert axes_at(graph, "b.weight", 1) == [dims, heads]
    assert heads.exact
    assert dims.exact


def test_einops_with_a_literal_blocks_what_it_names_only():
    net = Net(
        lambda n, x: n.b(einops.rearrange(n.a(x), "b (h d) -> b (d h)", h=3)),
        a=Linear(6, 12),
        b=Linear(12, 3),
    )
    assert sizes_at(proved(net, X), "a.weight") == [4]


def test_a_view_across_the_grain_is_blocked():
    net = Net(
        lambda n, x: n.b(n.a(x).view(2, n.i, n.j).transpose(1, 2).reshape(2, n.i, n.j).sum(2)),
        a=Linear(6, 12), b=Linear(3, 3), i=3, j=4,
    )  # fmt: skip
    graph = proved(net, X)
    assert "no common refinement of" in reason(graph, "a.weight")


def test_minus_one_takes_up_a_cut_of_what_is_folded_into_it():
    graph = proved(Net(lambda n, x: n.b(n.a(x).view(-1, 4)).view(2, -1, 3).sum(1), a=Linear(6, 8), b=Linear(4, 3)), X)
    assert sizes_at(graph, "a.weight") == [2]


def test_view_as_another_ties_counts():
    net = Net(
        lambda n, x: n.c(n.a(x).view_as(n.b(x).unflatten(1, (n.k, -1))).flatten(1)) + n.d(n.b(x)),
        a=Linear(6, 8), b=Linear(6, 8), c=Linear(8, 3), d=Linear(8, 3), k=2,
    )  # fmt: skip
    graph = proved(net, X)
    assert sizes_at(graph, "a.weight") == sizes_at(graph, "b.weight") == [2, 4]
    assert axes_at(graph, "a.weight") != axes_at(graph, "b.weight")


@pytest.mark.parametrize(
    "spread",
    [
        lambda n, h: n.p.expand_as(h),
        lambda n, h: n.p.expand(h.shape),
        lambda n, h: n.p.expand(-1, h.shape[1]).expand(h.shape[0], -1),
        lambda n, h: torch.broadcast_tensors(n.p, h)[0],
        lambda n, h: torch.broadcast_to(n.p, h.size()),
        lambda n, h: n.p.repeat(h.shape[0], h.shape[1]),
        lambda n, h: torch.ones_like(h) * n.p,
        lambda n, h: torch.full((2, h.shape[-1]), 3.0, dtype=h.dtype) * n.p,
        lambda n, h: h.new_ones(h.shape) * n.p,
        lambda n, h: h.new_zeros(2, n.k) + n.p,
    ],
    ids=["expand_as", "expand", "expand -1", "broadcast_tensors", "broadcast_to", "repeat", "ones_like", "full",
         "new_ones", "held"],
)  # fmt: skip
def test_what_is_spread_to_the_size_of_an_axis_follows_its_count(spread):
    net = Net(
        lambda n, x: n.b(spread(n, n.a(x))) + n.c(n.a(x)), a=Linear(6, 8), b=Linear(8, 3), c=Linear(8, 3),
        p=weight(1, 1), k=8,
    )  # fmt: skip
    graph = proved(net, X)
    assert sizes_at(graph, "b.weight", 1) == [8]
    assert sizes_at(graph, "a.weight") == [8]


def test_meshgrid_is_made_of_its_vectors():
    def run(n, x):
        rows, columns = torch.meshgrid(n.p, n.q, indexing="ij")
        return n.a(x) @ rows @ n.w + (columns @ n.q).sum()

    graph = proved(Net(run, a=Linear(6, 8), p=weight(8), q=weight(5), w=weight(5, 3)), X)
    assert tied(graph, ("a.weight", 0), ("p", 0))


@pytest.mark.parametrize(
    ("again", "order"),
    [
        (lambda n, h: h.repeat(1, n.k), "copies first"),
        (lambda n, h: torch.tile(h, (1, n.k)), "copies first"),
        (lambda n, h: h[:, None].expand(-1, n.k, -1).flatten(1), "copies first"),
        (lambda n, h: h.repeat_interleave(n.k, dim=1), "copies last"),
        (lambda n, h: torch.repeat_interleave(h, n.k, -1), "copies last"),
        (lambda n, h: h.unsqueeze(-1).expand(2, h.shape[1], n.k).reshape(2, -1), "copies last"),
        (lambda n, h: einops.repeat(h, "b c -> b (c k)", k=n.k), "copies last"),
    ],
    ids=["repeat", "tile", "expand", "repeat_interleave", "torch.repeat_interleave", "expand last", "einops"],
)
def test_repeats_are_a_product_whose_number_is_held(again, order):
    net = Net(lambda n, x: n.b(again(n, n.a(x))), a=Linear(6, 4), b=Linear(12, 3), k=3)
    graph = proved(net, X)
    assert sizes_at(graph, "a.weight") == [4]
    assert sizes_at(graph, "b.weight", 1) == ([3, 4] if order == "copies first" else [4, 3])


@pytest.mark.parametrize(
    "again",
    [
        lambda h: h.repeat(1, 3),
        lambda h: h.repeat_interleave(3, 1),
        lambda h: h[:, None].expand(2, 3, -1).flatten(1),
    ],
)
def test_a_literal_number_of_repeats_is_blocked(again):
    graph = proved(Net(lambda n, x: n.b(again(n.a(x))), a=Linear(6, 4), b=Linear(12, 3)), X)
    assert sizes_at(graph, "b.weight", 1) == [4]
    assert tied(graph, ("a.weight", 0), ("b.weight", 1))


def test_an_axis_made_by_a_function_that_hides_its_size_is_blocked():
    explain = Explainer()
    made = explain.fresh(8)
    explain.account("somewhere", list)
    assert "somewhere: where its size comes from is not known" in why_fixed(made)


def test_what_is_drawn_by_randint_has_the_sizes_that_it_is_given():
    def forward(n, x):
        return n.b(torch.randint(1, 2, (2, n.d)) * n.a(x) + torch.randint(high=1, size=(2, n.d)))

    graph = proved(Net(forward, a=Linear(6, 8), b=Linear(8, 3), d=8), X)
    assert axis_at(graph, "a.weight").size == 8
    fixed = Net(lambda n, x: n.b(torch.randint(1, 2, (2, 8)).to(x.dtype)) + n.c(x), b=Linear(8, 3), c=Linear(6, 3))
    assert "8 is a literal at" in reason(proved(fixed, X), "b.weight", 1)


def test_squeeze_keeps_an_axis_from_coming_down_to_one():
    net = Net(lambda n, x: n.b(n.a(x).unsqueeze(1).squeeze()), a=Linear(6, 2), b=Linear(2, 3))
    graph = proved(net, X)
    assert "must satisfy" in reason(graph, "a.weight")
    net = Net(lambda n, x: n.b(n.a(x).unsqueeze(1).squeeze()), a=Linear(6, 8), b=Linear(8, 3))
    assert axis_at(proved(net, X, ratios=(0.9, 0.95)), "a.weight").size == 8


def test_padding_is_a_piece_of_its_own():
    net = Net(
        lambda n, x: n.b(F.pad(n.a(x), (0, n.k)) + n.c(x)),
        a=Linear(6, 8),
        b=Linear(11, 3),
        c=Linear(6, 11),
        k=3,
    )
    graph = proved(net, X)
    assert sizes_at(graph, "c.weight") == [8, 3]
    assert sizes_at(graph, "a.weight") == [8]


def test_cropping_by_negative_padding():
    net = Net(lambda n, x: n.b(F.pad(n.a(x), (-n.k, 0))), a=Linear(6, 8), b=Linear(5, 3), k=3)
    assert sizes_at(proved(net, X), "b.weight", 1) == [5]


@pytest.mark.parametrize("reorder", [lambda h: h.flip(-1), lambda h: h.roll(1, 1)], ids=["flip", "roll"])
def test_reordering_blocks(reorder):
    graph = proved(Net(lambda n, x: n.b(reorder(n.a(x))), a=Linear(6, 8), b=Linear(8, 3)), X)
    assert "reordered" in reason(graph, "a.weight")


def test_sizes_from_numpy_are_literals():
    import numpy as np

    net = Net(
        lambda n, x: n.b(n.a(x).view(2, np.int64(2), np.int64(4)).transpose(1, 2).flatten(1)),
        a=Linear(6, 8),
        b=Linear(8, 3),
    )
    assert "literal" in reason(proved(net, X), "a.weight")


def test_a_view_over_batch_and_axis_together():
    net = Net(
        lambda n, x: n.b(n.a(x).permute(2, 0, 1).reshape(n.h, -1, 5).sum(1).sum(1).unsqueeze(0)),
        a=Linear(6, 8),
        b=Linear(4, 3),
        h=4,
    )
    graph = proved(net, SEQUENCE)
    assert sizes_at(graph, "a.weight") == [4, 2]
    assert sizes_at(graph, "b.weight", 1) == [4]


def test_views_in_place():
    def run(n, x):
        h = n.a(x).unsqueeze_(1).transpose_(1, 2).squeeze_(2)
        return n.b(h.relu_().add_(n.p))

    graph = proved(Net(run, a=Linear(6, 8), b=Linear(8, 3), p=weight(8)), X)
    assert tied(graph, ("a.weight", 0), ("p", 0), ("b.weight", 1))


def test_functions_under_vmap_hide_their_sizes():
    net = Net(
        lambda n, x: n.b(torch.func.vmap(lambda r: r.view(2, 4).sum(0))(n.a(x))),
        a=Linear(6, 8),
        b=Linear(4, 3),
    )
    assert "cannot be seen" in reason(proved(net, X), "a.weight")


def test_unfolding_a_sequence_keeps_its_channels():
    net = Net(lambda n, x: n.b(n.a(x).unfold(1, 2, 1).flatten(2)), a=Linear(6, 4), b=Linear(8, 3))
    assert tied(proved(net, SEQUENCE), ("a.weight", 0), ("b.weight", 1))


def test_diagonals_tie_rows_and_columns():
    net = Net(lambda n, x: n.b(n.a(x) @ (n.m + n.m.diagonal())), a=Linear(6, 8), m=weight(8, 8), b=Linear(8, 3))
    assert tied(proved(net, X), ("a.weight", 0), ("m", 0), ("m", 1), ("b.weight", 1))


def test_a_module_that_unflattens():
    net = nn.Sequential(Linear(6, 12), nn.Unflatten(1, (3, 4)), nn.Flatten(), Linear(12, 2))
    graph = proved(net, X)
    assert sizes_at(graph, "0.weight") == [3, 4]
