"""Where sizes come from: held, read from shapes, literal; used as numbers, compared, in equations."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import Linear

import secateur as sec
from oracle import Net, axis_at, cut, each_axis, proved, randomised, reason, sizes_at, to_double
from secateur.planning.plans import plan
from secateur.planning.targets import Ratio

X = torch.randn(2, 6)


def layers(run, **parts):
    return Net(run, a=Linear(6, 8), b=Linear(8, 3), **parts)


def swapped(h, outer):
    return h.view(h.shape[0], outer, -1).transpose(1, 2).flatten(1)


@pytest.mark.parametrize(
    ("held", "get"),
    [
        ({"k": 2}, lambda n: n.k),
        ({"ks": [1, 2]}, lambda n: n.ks[1]),
        ({"ks": (7, 2)}, lambda n: n.ks[-1]),
        ({"ks": {"outer": 2}}, lambda n: n.ks["outer"]),
        ({"config": SimpleNamespace(outer=2)}, lambda n: n.config.outer),
        ({"config": SimpleNamespace(inner={"k": (1, 2)})}, lambda n: n.config.inner["k"][1]),
        ({"k": 4}, lambda n: n.k // 2),
        ({"k": 1}, lambda n: n.k + 1),
        ({"k": 8}, lambda n: n.k >> 2),
    ],
    ids=["attribute", "list", "tuple", "dict", "config", "nested", "halved", "plus one", "shifted"],
)
def test_a_held_size_is_rewritten_wherever_it_is_held(held, get):
    net = layers(lambda n, x: n.b(swapped(n.a(x), get(n))), **held)
    assert sizes_at(proved(net, X), "a.weight")[-1] == 4
    if "plus" not in str(held):
        assert 4 in sizes_at(proved(net, X), "b.weight", 1)


def test_the_rewritten_value_is_the_new_count():
    net = randomised(layers(lambda n, x: n.b(swapped(n.a(x), n.k)), k=4))
    graph = sec.trace(net, to_double(X))
    small = cut(net, plan(graph, each_axis(graph, 0.5)))
    assert small.k == 2
    assert type(small.k) is int
    assert small.a.out_features == 2
    assert (net.k, net.a.out_features) == (4, 8)


def test_a_literal_names_file_line_and_number():
    graph = proved(layers(lambda n, x: n.b(n.a(x)[:, :8])), X)
    line = test_a_literal_names_file_line_and_number.__code__.co_firstlineno + 1
    assert (
        reason(graph, "a.weight")
        == f"8 is a literal at test_trace_sizes.py:{line}; hold it in an attribute to make it cuttable"
    )


FAR = 8


@pytest.mark.parametrize(
    "width",
    [lambda n: int(4 * n.ratio), lambda n: FAR, lambda n: n.table.tolist()[0]],
    ids=["float", "global", "NumPy"],
)
def test_a_number_that_went_where_nothing_remembers_is_no_literal(width):
    net = layers(lambda n, x: n.b(n.a(x)[:, : width(n)]), ratio=2.0, table=np.array([8]))
    found = reason(proved(net, X), "a.weight")
    assert found.startswith("where the 8 at test_trace_sizes.py:")
    assert "comes from is not known" in found


def test_a_literal_factor_leaves_the_other_factor_free():
    assert sizes_at(proved(layers(lambda n, x: n.b(swapped(n.a(x), 2))), X), "a.weight") == [4]


NUMBERS = {
    "sqrt": lambda h: math.sqrt(h.shape[1]),
    "power": lambda h: h.shape[1] ** -0.5,
    "division": lambda h: 1 / h.shape[1],
    "divided": lambda h: h.shape[-1] / 2,
    "float": lambda h: float(h.size(1)),
    "int": lambda h: int(h.shape[1]),
    "times": lambda h: h.shape[1] * 1.5,
    "log": lambda h: math.log(h.shape[1]),
    "log2": lambda h: math.log2(h.size(-1)),
    "isqrt": lambda h: math.isqrt(h.shape[1] + 1),
    "shift": lambda h: h.shape[1] >> 1,
    "divmod": lambda h: divmod(h.shape[1], 3)[0],
    "abs": lambda h: abs(h.shape[1]),
    "round": lambda h: round(h.shape[1]),
    "bits": lambda h: h.shape[1] & 12,
    "numpy": lambda h: float(np.sqrt(h.shape[1])),
    "len": lambda h: len(h[0]),
    "numel": lambda h: h.numel(),
    "nelement": lambda h: h.nelement(),
    "torch.numel": lambda h: torch.numel(h),
    "product": lambda h: math.prod(h.shape),
    "tensor": lambda h: torch.tensor(h.shape[1]),
    "itself": lambda h: h.shape[1],
}


@pytest.mark.parametrize("use", NUMBERS)
def test_a_size_used_as_a_number_is_inexact_and_says_where(use):
    graph = proved(layers(lambda n, x: n.b(h := n.a(x)) * NUMBERS[use](h)), X)
    axis = axis_at(graph, "a.weight")
    assert not axis.exact
    assert "its size is used as a number, by " in axis.why
    assert "test_trace_sizes.py:" in axis.why


def test_a_held_number_that_counts_nothing_is_exact():
    assert axis_at(proved(layers(lambda n, x: n.b(n.a(x)) * n.k / math.sqrt(n.k), k=8), X), "a.weight").exact


def test_a_held_number_that_counts_an_axis_is_inexact():
    axis = axis_at(proved(layers(lambda n, x: n.b(n.a(x).view(-1, n.k)) / math.sqrt(n.k), k=8), X), "a.weight")
    assert "used as a number" in axis.why


@pytest.mark.parametrize(
    ("branch", "left"),
    [
        (lambda h: h.shape[1] == 8, None),
        (lambda h: h.shape[1] % 4 == 0, 8),
        (lambda h: not h.shape[1] % 4, 8),
        (lambda h: h.shape[1] > 3, 8),
        (lambda h: h.shape[1] != 5, 8),
        (lambda h: h.shape == (2, 8), None),
        (lambda h: {8: True}.get(h.shape[1], False), None),
    ],
    ids=["equal", "multiple", "not a remainder", "more", "unequal", "whole shape", "dict"],
)
@pytest.mark.parametrize("ratios", [(0.4, 0.5, 0.6), (0.3, 0.8, 0.9)])
def test_a_branch_that_depends_on_a_size_is_taken_after_the_cut_too(branch, left, ratios):
    def run(n, x):
        h = n.a(x)
        return n.b(h * 2 if branch(h) else h)

    graph = proved(layers(run), X, ratios=ratios)
    if left is None:
        assert "8" in reason(graph, "a.weight")
        assert "test_trace_sizes.py:" in reason(graph, "a.weight")
    else:
        assert axis_at(graph, "a.weight").size == left


def test_a_count_that_would_take_another_branch_is_never_planned():
    def run(n, x):
        h = n.a(x)
        return n.b(h * 2 if h.shape[1] == 23 else h)

    net = randomised(Net(run, a=Linear(6, 64), b=Linear(64, 3)))
    graph = sec.trace(net, to_double(X))
    for removed in range(38, 44):
        chosen = plan(graph, Ratio(removed / 64 + 1e-6))
        assert all(len(axis.keep) != 23 for axis in chosen.axes)


def test_one_attribute_with_two_meanings():
    def run(n, x):
        h = n.a(x).view(2, n.k, -1).sum(2)
        return n.c(n.b(h).view(2, n.k, -1).sum(2))

    graph = proved(Net(run, a=Linear(6, 8), b=Linear(2, 6), c=Linear(2, 3), k=2), X, ratios=(0.5, 0.25, 0.75))
    assert graph.constraints


def test_counts_that_an_equation_ties():
    def run(n, x):
        h = n.a(x)
        outer = h.shape[1] // 4
        return n.b(h.view(2, outer, 4).transpose(1, 2).reshape(2, 4 * outer))

    assert sizes_at(proved(layers(run), X), "a.weight") == [2]


def test_modules_keep_their_own_words_for_their_sizes():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.GroupNorm(8, 8),
        nn.Conv2d(8, 2, 1),
    )
    net, x = randomised(net), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    small = cut(net, plan(sec.trace(net, x), Ratio(0.5)))
    assert small[2].groups == 4
    assert small[3].num_groups == 4
    assert small[0].out_channels == small[2].in_channels == small[1].num_features == 4


@pytest.mark.parametrize(
    "used",
    [
        lambda h: h * torch.full((1,), h.shape[-1]),
        lambda h: h * h.new_full((2, h.shape[1]), h.shape[1]),
        lambda h: h * torch.randint(h.shape[-1], h.shape[-1] + 1, (1,)),
        lambda h: h * torch.scalar_tensor(h.shape[-1], dtype=h.dtype),
        lambda h: torch.addmm(h, h[:, :2], h[:2], alpha=h.shape[1]),
        lambda h: h + h.norm(h.shape[1], 0),
        lambda h: h[:1] * torch.arange(9.0).roll(h.shape[1])[0],
        lambda h: (lambda d: h * torch.full((2, d), d))(h.shape[1]),
    ],
)
def test_a_size_among_the_other_arguments_of_a_function_that_takes_sizes_is_a_number(used):
    graph = sec.trace(layers(lambda n, x: n.b(used(n.a(x)))), X)
    assert "its size is used as a number" in axis_at(graph, "a.weight").why


def test_sizes_that_mean_sizes_are_no_numbers():
    def run(n, x):
        h = n.a(x)
        d = h.shape[-1]
        return n.b(h.view(2, d).expand(2, d)[:, :d].narrow(1, 0, d) + torch.full((2, d), 0.5))

    assert axis_at(proved(layers(run), X), "a.weight").exact


def test_reasons_name_the_op_and_the_line():
    net = Net(lambda n, x: n.b(torch.normal(0.0, 1.0, (2, 8))) + n.c(x), b=Linear(8, 3), c=Linear(6, 3))
    assert reason(sec.trace(net, X), "b.weight", 1).startswith("normal: makes it anew (test_trace_sizes.py:")
    net = Net(lambda n, x: n.b(torch.tensor([[1.0] * 8])) + n.c(x), b=Linear(8, 3), c=Linear(6, 3))
    assert "numbers that the code makes (test_trace_sizes.py:" in reason(sec.trace(net, X), "b.weight", 1)
