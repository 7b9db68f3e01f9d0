"""Normalisations, embeddings, parametrizations and per-channel buffers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Conv1d, Conv2d, Linear

from oracle import Net, axes_at, axis_at, proved, reason, sites, sizes_at, tied, weight

X = torch.randn(2, 6)
IMAGE = torch.randn(2, 3, 8, 8)
TOKENS = torch.tensor([[1, 4, 2, 0, 3], [0, 9, 8, 1, 7]])


def channels(norm):
    return nn.Sequential(Conv2d(3, 8, 3), norm, nn.ReLU(), Conv2d(8, 2, 1))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("stats", [True, False])
def test_batch_norm_follows_its_channels(affine, stats):
    graph = proved(channels(nn.BatchNorm2d(8, affine=affine, track_running_stats=stats)), IMAGE)
    (axis,) = graph.axes
    assert axis.exact
    assert ("1.weight[0]" in sites(axis)) is affine
    assert ("1.running_var[0]" in sites(axis)) is stats


@pytest.mark.parametrize("rank", [1, 3])
def test_batch_norm_of_other_ranks(rank):
    conv, norm = getattr(nn, f"Conv{rank}d"), getattr(nn, f"BatchNorm{rank}d")
    graph = proved(nn.Sequential(conv(3, 8, 3), norm(8), conv(8, 2, 1)), torch.randn(2, 3, *[6] * rank))
    assert axis_at(graph, "1.running_mean").exact


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("stats", [True, False])
def test_instance_norm_with_and_without_running_stats(affine, stats):
    graph = proved(channels(nn.InstanceNorm2d(8, affine=affine, track_running_stats=stats)), IMAGE)
    (axis,) = graph.axes
    assert axis.exact
    assert ("1.running_mean[0]" in sites(axis)) is stats


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm(8, bias=False), nn.RMSNorm(8)],
    ids=["layer norm", "without affine", "without bias", "rms norm"],
)
def test_a_norm_over_the_axis_is_inexact_and_says_so(norm):
    graph = proved(nn.Sequential(Linear(6, 8), norm, Linear(8, 3)), X)
    (axis,) = graph.axes
    assert not axis.exact
    assert "statistic" in axis.why
    assert tied(graph, ("0.weight", 0), ("2.weight", 1))


def test_a_norm_spelled_out():
    def run(n, x):
        h = n.a(x)
        return n.b(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * n.g)

    axis = axis_at(proved(Net(run, a=Linear(6, 8), b=Linear(8, 3), g=weight(8)), X), "g")
    assert not axis.exact
    assert "statistic" in axis.why


def test_a_norm_over_other_dimensions_is_exact():
    net = nn.Sequential(Conv1d(3, 8, 3), nn.LayerNorm([6]), Conv1d(8, 2, 1))
    assert axis_at(proved(net, torch.randn(2, 3, 8)), "0.weight").exact


def test_a_norm_over_channels_and_space():
    graph = proved(channels(nn.LayerNorm([8, 6, 6])), IMAGE)
    assert sizes_at(graph, "1.weight", 0) == [8]
    assert not axis_at(graph, "0.weight").exact


def test_group_norm_is_exact_in_groups_and_not_in_their_channels():
    graph = proved(channels(nn.GroupNorm(4, 8)), IMAGE)
    groups, inner = axes_at(graph, "0.weight")
    assert (groups.size, inner.size) == (4, 2)
    assert groups.exact
    assert not inner.exact
    assert axes_at(graph, "1.weight") == [groups, inner]


@pytest.mark.parametrize(("groups", "exact"), [(1, False), (8, True)], ids=["one group", "one channel per group"])
def test_group_norm_at_its_extremes(groups, exact):
    assert axis_at(proved(channels(nn.GroupNorm(groups, 8)), IMAGE), "0.weight").exact is exact


def test_group_norm_meets_a_grouped_convolution():
    net = nn.Sequential(Conv2d(3, 12, 1), nn.GroupNorm(6, 12), Conv2d(12, 12, 3, groups=3), Conv2d(12, 2, 1))
    assert sizes_at(proved(net, IMAGE), "0.weight") == [3, 2, 2]


def test_prelu_per_channel_and_shared():
    graph = proved(channels(nn.PReLU(8)), IMAGE)
    assert tied(graph, ("0.weight", 0), ("1.weight", 0))
    graph = proved(channels(nn.PReLU()), IMAGE)
    assert axis_at(graph, "0.weight").exact


def test_per_channel_buffers_follow():
    net = Net(
        lambda n, x: n.b((n.a(x) - n.mean.view(1, -1, 1, 1)) * n.scale[:, None, None]),
        {"mean": torch.zeros(8), "scale": torch.zeros(8)}, a=Conv2d(3, 8, 1), b=Conv2d(8, 2, 1),
    )  # fmt: skip
    assert tied(proved(net, IMAGE), ("a.weight", 0), ("mean", 0), ("scale", 0), ("b.weight", 1))


def test_an_embedding_has_rows_that_stay_and_a_width():
    net = nn.Sequential(nn.Embedding(10, 8, padding_idx=0), Linear(8, 3))
    graph = proved(net, TOKENS)
    assert tied(graph, ("0.weight", 1), ("1.weight", 1))
    assert reason(graph, "0.weight", 0) == "embedding: its positions are chosen by an index"


def test_tied_embeddings_are_one_tensor():
    def run(n, tokens):
        return n.out(torch.tanh(n.embed(tokens)))

    net = Net(run, embed=nn.Embedding(10, 8), out=Linear(8, 10, bias=False))
    net.out.weight = net.embed.weight
    graph = proved(net, TOKENS)
    (axis,) = graph.axes
    assert sites(axis) == {"embed.weight[1]", "out.weight[1]"}


def test_tied_weights_used_both_ways_round():
    net = Net(lambda n, x: F.linear(torch.tanh(n.a(x)), n.a.weight.t(), n.c), a=Linear(6, 8), c=weight(6))
    assert sites(axis_at(proved(net, X), "a.weight")) == {"a.weight[0]", "a.bias[0]"}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("given", ["rows", "offsets"])
def test_embedding_bags(mode, given):
    bag = nn.EmbeddingBag(10, 8, mode=mode)
    net = Net(lambda n, *args: n.out(n.bag(*args)), bag=bag, out=Linear(8, 3))
    example = TOKENS if given == "rows" else (TOKENS.flatten(), torch.tensor([0, 4]))
    assert tied(proved(net, example), ("bag.weight", 1), ("out.weight", 1))


def test_an_embedding_bag_with_weights_per_sample():
    net = Net(
        lambda n, i, w: n.out(n.bag(i, per_sample_weights=w)),
        bag=nn.EmbeddingBag(10, 8, mode="sum"),
        out=Linear(8, 3),
    )
    assert axis_at(proved(net, (TOKENS, torch.randn(2, 5))), "bag.weight", 1).exact


def test_positions_looked_up_and_added():
    def run(n, tokens):
        return n.out(n.embed(tokens) + n.position(torch.arange(tokens.shape[1])) + n.table[:, : tokens.shape[1]])

    net = Net(run, embed=nn.Embedding(10, 8), position=nn.Embedding(5, 8), table=weight(1, 7, 8), out=Linear(8, 3))
    assert tied(proved(net, TOKENS), ("embed.weight", 1), ("position.weight", 1), ("table", 2), ("out.weight", 1))


@pytest.mark.parametrize(
    "module", [Linear(6, 8), nn.Sequential(nn.Unflatten(1, (3, 2)), Conv1d(3, 8, 1), nn.Flatten())]
)
def test_weight_norm_as_a_parametrization(module):
    target = module if isinstance(module, Linear) else module[1]
    nn.utils.parametrizations.weight_norm(target)
    width = 8 if isinstance(module, Linear) else 16
    net = nn.Sequential(module, nn.ReLU(), nn.utils.parametrizations.weight_norm(Linear(width, 3)))
    # A row of zeros has no direction: leave the removed rows of the direction, their length is zero.
    graph = proved(net, X, fill=lambda name, dim: 0.7 if name.endswith("original1") and dim == 0 else 0.0)
    prefix = "0" if isinstance(module, Linear) else "0.1"
    names = f"{prefix}.parametrizations.weight.original0", f"{prefix}.parametrizations.weight.original1"
    assert tied(graph, (names[0], 0), (names[1], 0), (f"{prefix}.bias", 0))
    assert axis_at(graph, names[0]).exact
    assert axis_at(graph, names[0]).name.startswith(prefix)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_of_the_old_style():
    net = nn.Sequential(nn.utils.weight_norm(Linear(6, 8)), nn.ReLU(), Linear(8, 3))
    with torch.no_grad():
        net(X)  # its weight is a leaf again, so that the module can be copied
    graph = proved(net, X, fill=lambda name, dim: 0.7 if name.endswith("weight_v") and dim == 0 else 0.0)
    assert tied(graph, ("0.weight_g", 0), ("0.weight_v", 0), ("0.bias", 0), ("2.weight", 1))


def test_spectral_norm_follows_with_its_vectors():
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(Linear(6, 8)), nn.ReLU(), Linear(8, 3))
    graph = proved(net, X)
    axis = axis_at(graph, "0.bias")
    assert {
        "0.parametrizations.weight.original[0]",
        "0.parametrizations.weight.0._u[0]",
        "2.weight[1]",
    } <= sites(axis)


def test_spectral_norm_of_the_old_style():
    net = nn.Sequential(nn.utils.spectral_norm(Linear(6, 8)), nn.ReLU(), Linear(8, 3)).eval()
    with torch.no_grad():
        net(X)
    assert {"0.weight_orig[0]", "0.weight_u[0]"} <= sites(axis_at(proved(net, X), "0.bias"))


def test_an_orthogonal_parametrization_is_blocked_where_it_is_solved():
    net = nn.Sequential(nn.utils.parametrizations.orthogonal(Linear(6, 8)), Linear(8, 3))
    graph = proved(net, X)
    assert "triangle" in reason(graph, "0.parametrizations.weight.original")
    assert tied(graph, ("0.bias", 0), ("0.parametrizations.weight.0.base", 0), ("1.weight", 1))


def test_standardised_weights_are_inexact_in_what_they_average_over():
    def run(n, x):
        w = n.b.weight
        mean, var = w.mean((1, 2, 3), keepdim=True), w.var((1, 2, 3), keepdim=True)
        return n.c(F.conv2d(n.a(x), (w - mean) / (var + 1e-5).sqrt(), n.b.bias))

    graph = proved(Net(run, a=Conv2d(3, 8, 1), b=Conv2d(8, 6, 3), c=Conv2d(6, 2, 1)), IMAGE)
    assert not axis_at(graph, "a.weight").exact
    assert axis_at(graph, "c.weight", 1).exact
