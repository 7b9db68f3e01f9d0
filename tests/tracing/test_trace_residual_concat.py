"""Sums tie, concatenations keep apart: residual streams, DenseNet, squeeze-excite, gates, split and friends."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Conv2d, Linear

from oracle import Net, axes_at, axis_at, proved, reason, sites, sizes_at, tied, weight

X = torch.randn(2, 6)
IMAGE = torch.randn(2, 3, 8, 8)


def test_a_chain_has_one_axis_per_hidden_layer():
    graph = proved(nn.Sequential(Linear(6, 8), nn.ReLU(), Linear(8, 3)), X)
    (axis,) = graph.axes
    assert (axis.name, axis.size, axis.exact) == ("0 features", 8, True)
    assert sites(axis) == {"0.weight[0]", "0.bias[0]", "2.weight[1]"}
    assert reason(graph, "0.weight", 1) == "a dimension of the model's input"
    assert reason(graph, "2.weight", 0) == "a dimension of the model's output"


def test_a_residual_ties_the_stream_and_leaves_the_inside_free():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = Conv2d(8, 5, 3, padding=1), nn.BatchNorm2d(5)
            self.conv2, self.bn2 = Conv2d(5, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x):
            return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()

    graph = proved(nn.Sequential(Conv2d(3, 8, 1), Block(), Block(), Conv2d(8, 3, 1)), IMAGE)
    assert sorted(axis.size for axis in graph.axes) == [5, 5, 8]
    stream = (
        ("0.weight", 0),
        ("1.conv1.weight", 1),
        ("1.conv2.weight", 0),
        ("2.conv2.weight", 0),
        ("3.weight", 1),
    )
    assert tied(graph, *stream)
    assert tied(graph, ("1.conv1.weight", 0), ("1.bn1.running_mean", 0), ("1.conv2.weight", 1))
    assert all(axis.exact for axis in graph.axes)
    assert "1.conv1 channels" in {axis.name for axis in graph.axes}


def test_a_projected_shortcut_ties_only_what_is_added():
    net = Net(
        lambda n, x: n.out(n.a(x) + n.b(n.c(x))),
        a=Linear(6, 8),
        b=Linear(5, 8),
        c=Linear(6, 5),
        out=Linear(8, 3),
    )
    graph = proved(net, X)
    assert tied(graph, ("a.weight", 0), ("b.weight", 0), ("out.weight", 1))
    assert tied(graph, ("c.weight", 0), ("b.weight", 1))


def test_a_concatenation_keeps_its_parts_apart():
    net = Net(lambda n, x: n.out(torch.cat([n.a(x), n.b(x)], -1)), a=Linear(6, 4), b=Linear(6, 5), out=Linear(9, 3))
    graph = proved(net, X)
    assert sizes_at(graph, "out.weight", 1) == [4, 5]
    assert axis_at(graph, "a.weight") is not axis_at(graph, "b.weight")


def test_a_tensor_concatenated_with_itself_is_cut_twice():
    graph = proved(Net(lambda n, x: n.out(torch.cat([h := n.a(x), h], 1)), a=Linear(6, 4), out=Linear(8, 3)), X)
    assert tied(graph, ("a.weight", 0), ("out.weight", 1))


def test_a_concatenation_in_another_order_added_to_itself_ties_crosswise():
    def run(n, x):
        h = n.a(x)
        first, second = h.split([n.k, n.k], 1)
        return n.out(torch.cat([second, first], 1) + h)

    graph = proved(Net(run, a=Linear(6, 8), out=Linear(8, 3), k=4), X)
    assert sizes_at(graph, "a.weight") == [4]


def test_densenet_grows_one_axis_per_layer():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = Conv2d(3, 6, 3, padding=1)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.BatchNorm2d(6 + 4 * i), nn.ReLU(), Conv2d(6 + 4 * i, 4, 3, padding=1))
                for i in range(3)
            )
            self.head = Conv2d(18, 2, 1)

        def forward(self, x):
            features = [self.stem(x)]
            for layer in self.layers:
                features.append(layer(torch.cat(features, 1)))
            return self.head(torch.cat(features, 1))

    graph = proved(Dense(), IMAGE)
    assert sizes_at(graph, "head.weight", 1) == [6, 4, 4, 4]
    assert sizes_at(graph, "layers.2.0.running_var") == [6, 4, 4]


def test_squeeze_excite_ties_the_gate_to_the_channels():
    class Excite(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.down, self.up, self.out = (
                Conv2d(3, 8, 1),
                Conv2d(8, 4, 1),
                Conv2d(4, 8, 1),
                Conv2d(8, 3, 1),
            )

        def forward(self, x):
            x = self.conv(x)
            gate = self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
            return self.out(x * gate)

    graph = proved(Excite(), IMAGE)
    assert tied(graph, ("conv.weight", 0), ("up.weight", 0), ("down.weight", 1), ("out.weight", 1))
    assert tied(graph, ("down.weight", 0), ("up.weight", 1))
    assert all(axis.exact for axis in graph.axes)


@pytest.mark.parametrize(
    "gate",
    [
        lambda h: F.glu(h, -1),
        lambda h: (lambda a, b: a * b.sigmoid())(*h.chunk(2, -1)),
        lambda h: h.view(2, 2, -1)[:, 0] * h.view(2, 2, -1)[:, 1].sigmoid(),
    ],
    ids=["glu", "chunk", "view"],
)
def test_a_fused_gate_ties_its_halves(gate):
    graph = proved(Net(lambda n, x: n.out(gate(n.up(x))), up=Linear(6, 8), out=Linear(4, 3)), X)
    assert tied(graph, ("up.weight", 0), ("up.bias", 0), ("out.weight", 1))
    assert axis_at(graph, "up.weight").size == 4


def test_a_literal_split_is_blocked_and_an_attribute_is_not():
    def run(n, x):
        a, b = n.up(x).split(n.k, 1)
        return n.out(a * b)

    graph = proved(Net(run, up=Linear(6, 8), out=Linear(4, 3), k=4), X)
    assert axis_at(graph, "up.weight").size == 4

    def literal(n, x):
        a, b = n.up(x).split(4, 1)
        return n.out(a * b)

    graph = proved(Net(literal, up=Linear(6, 8), out=Linear(4, 3)), X)
    assert graph.axes == ()
    assert reason(graph, "up.weight").startswith("4 is a literal at test_trace_residual_concat.py:")


def outs(n, *parts):
    return sum(getattr(n, name)(part) for name, part in zip("bcd", parts, strict=False))


@pytest.mark.parametrize(
    ("apart", "sizes"),
    [
        (lambda n, h: h.split([n.i, n.j, n.k], 1), [3, 4, 5]),
        (lambda n, h: h.split((n.i, n.j, n.k), -1), [3, 4, 5]),
        (lambda n, h: torch.split(h, [n.i, n.j, n.k], dim=1), [3, 4, 5]),
        (lambda n, h: h.tensor_split((n.i, n.i + n.j), dim=1), [3, 4, 5]),
        (lambda n, h: h.tensor_split([n.i, -n.k], dim=1), [3, 4, 5]),
        (lambda n, h: (h[:, : n.i], h[:, n.i : n.i + n.j], h[:, n.i + n.j :]), [3, 4, 5]),
        (lambda n, h: (h[..., : n.i], h[..., n.i : -n.k], h[..., -n.k :]), [3, 4, 5]),
        (lambda n, h: (h.narrow(1, 0, n.i), h.narrow(1, n.i, n.j), h.narrow(-1, n.i + n.j, n.k)), [3, 4, 5]),
    ],
    ids=[
        "list",
        "tuple",
        "torch",
        "tensor_split",
        "tensor_split from the end",
        "slices",
        "from the end",
        "narrow",
    ],
)
def test_unequal_pieces_of_held_sizes_are_axes_of_their_own(apart, sizes):
    net = Net(
        lambda n, x: outs(n, *apart(n, n.a(x))),
        a=Linear(6, 12), b=Linear(3, 2), c=Linear(4, 2), d=Linear(5, 2), i=3, j=4, k=5,
    )  # fmt: skip
    graph = proved(net, X)
    assert sizes_at(graph, "a.weight") == sizes
    assert axis_at(graph, "c.weight", 1).size == 4


@pytest.mark.parametrize(
    "apart",
    [
        lambda h: h.chunk(3, 1),
        lambda h: h.chunk(chunks=3, dim=-1),
        lambda h: torch.tensor_split(h, 3, dim=1),
        lambda h: torch.tensor_split(h, sections=3, dim=1),
        lambda h: torch.hsplit(h, 3),
    ],
    ids=["chunk", "chunk by keyword", "tensor_split", "tensor_split by keyword", "hsplit"],
)
def test_equal_parts_are_cut_to_equal_counts_at_positions_of_their_own(apart):
    net = Net(lambda n, x: outs(n, *apart(n.a(x))), a=Linear(6, 12), b=Linear(4, 2), c=Linear(4, 2), d=Linear(4, 2))
    graph = proved(net, X)
    assert sizes_at(graph, "a.weight") == [4, 4, 4]
    assert len(graph.constraints) == 2


@pytest.mark.parametrize(
    "apart", [lambda h: h.chunk(3, 1), lambda h: h.tensor_split(3, 1)], ids=["chunk", "tensor_split"]
)
def test_parts_that_come_out_unequal_are_blocked(apart):
    widths = [part.shape[1] for part in apart(torch.zeros(1, 10))]
    parts = {name: Linear(n, 2) for name, n in zip("bcd", widths, strict=True)}
    graph = proved(Net(lambda n, x: outs(n, *apart(n.a(x))), a=Linear(6, 10), **parts), X)
    assert "parts of unequal length are made" in reason(graph, "a.weight")


def test_a_shorter_last_part_never_gets_longer_than_the_others():
    def run(n, x):
        a, b, c = n.a(x).split(n.k, 1)
        return n.b(a + b) + n.c(c)

    graph = proved(Net(run, a=Linear(6, 10), b=Linear(4, 2), c=Linear(2, 2), k=4), X, ratios=(0.25, 0.5, 0.75))
    assert sizes_at(graph, "a.weight") == [4, 2]


def test_splitting_into_pieces_longer_than_the_whole_changes_nothing():
    graph = proved(Net(lambda n, x: n.b(n.a(x).split(n.k, 1)[0]), a=Linear(6, 8), b=Linear(8, 3), k=99), X)
    assert axis_at(graph, "a.weight").size == 8


@pytest.mark.parametrize(
    ("position", "free"), [(0, 7), (3, 4), (-1, 7), (-3, 5)], ids=["first", "middle", "last", "from the end"]
)
def test_one_position_by_number_keeps_its_number(position, free):
    def run(n, x):
        h = n.a(x)
        return n.b(h) * h[:, position].unsqueeze(1) + torch.select(h, 1, position).unsqueeze(1)

    graph = proved(Net(run, a=Linear(6, 8), b=Linear(8, 3)), X)
    assert sizes_at(graph, "a.weight") == [free]


def test_positions_taken_apart_one_by_one_are_blocked():
    def run(n, x):
        q, k, v = n.qkv(x).view(2, 3, -1).unbind(1)
        return n.out(q * k + v)

    graph = proved(Net(run, qkv=Linear(6, 12), out=Linear(4, 3)), X)
    assert sizes_at(graph, "qkv.weight") == [4]
    graph = proved(Net(lambda n, x: n.out(torch.stack(n.a(x).unbind(1), 1)), a=Linear(6, 8), out=Linear(8, 3)), X)
    assert "taken apart one by one" in reason(graph, "a.weight")


def test_every_second_position_is_a_factor():
    def run(n, x):
        h = n.a(x)
        return n.b(h[:, ::2]) + n.c(h[:, 1::2])

    graph = proved(Net(run, a=Linear(6, 8), b=Linear(4, 3), c=Linear(4, 3)), X)
    assert tied(graph, ("a.weight", 0), ("b.weight", 1), ("c.weight", 1))
    assert axis_at(graph, "a.weight").size == 4


def test_a_stride_that_does_not_divide_is_blocked():
    graph = proved(Net(lambda n, x: n.b(n.a(x)[:, 1::3]), a=Linear(6, 8), b=Linear(3, 3)), X)
    assert "every 3th position" in reason(graph, "a.weight")


def test_a_literal_slice_fixes_the_piece_and_frees_the_rest():
    def run(n, x):
        h = n.a(x)
        return n.b(h[:, :3]) + n.c(h[:, 3:])

    graph = proved(Net(run, a=Linear(6, 8), b=Linear(3, 3), c=Linear(5, 3)), X)
    assert sizes_at(graph, "a.weight") == [5]
    assert reason(graph, "b.weight", 1).startswith("3 is a literal at test_trace_residual_concat.py:")


def test_writing_into_a_slice_ties_it():
    def run(n, x):
        h = n.a(x).relu()
        h[:, : n.k] += n.c(x)
        h[:, n.k :].mul_(n.g)
        return n.b(h)

    graph = proved(Net(run, a=Linear(6, 8), b=Linear(8, 3), c=Linear(6, 3), g=weight(5), k=3), X)
    assert sizes_at(graph, "b.weight", 1) == [3, 5]
    assert tied(graph, ("c.weight", 0), ("c.bias", 0))
    assert axes_at(graph, "g", 0) == [axes_at(graph, "a.weight")[1]]


def test_what_is_written_into_a_view_is_no_longer_zero():
    def run(n, x):
        h = n.a(x)
        h[:, : n.k].add_(1.0)
        return F.glu(h, 1).sum(1, keepdim=True) + n.b(x)

    graph = proved(Net(run, a=Linear(6, 8), b=Linear(6, 3), k=4), X)
    assert "not zero" in axis_at(graph, "a.weight").why


def test_filling_an_empty_tensor_piece_by_piece_concatenates():
    def run(n, x):
        both = torch.empty(2, n.i + n.j, dtype=x.dtype)
        both[:, : n.i] = n.a(x)
        both[:, n.i :] = n.b(x)
        return n.out(both)

    graph = proved(Net(run, a=Linear(6, 3), b=Linear(6, 5), out=Linear(8, 3), i=3, j=5), X)
    assert sizes_at(graph, "out.weight", 1) == [3, 5]


def test_stacking_ties_and_adds_a_fixed_dimension():
    net = Net(
        lambda n, x: n.out(torch.stack([n.a(x), n.b(x)], -1).flatten(1)),
        a=Linear(6, 4),
        b=Linear(6, 4),
        out=Linear(8, 3),
    )
    graph = proved(net, X)
    assert tied(graph, ("a.weight", 0), ("b.weight", 0), ("out.weight", 1))
