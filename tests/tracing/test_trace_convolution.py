"""Convolutions of every kind: which channels are tied to which, and what space does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Conv2d, Linear

import secateur as sec
from oracle import Net, axis_at, proved, reason, sizes_at, tied, weight

IMAGE = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_plain_convolutions_of_every_rank(rank, kind):
    conv = getattr(nn, f"{kind}{rank}d")
    net = nn.Sequential(conv(3, 8, 3, padding=1), nn.ReLU(), conv(8, 5, 3, stride=2, bias=False), conv(5, 2, 1))
    graph = proved(net, torch.randn(2, 3, *[7] * rank))
    out, inside = (1, 0) if "Transpose" in kind else (0, 1)
    assert tied(graph, ("0.weight", out), ("0.bias", 0), ("2.weight", inside))
    assert sorted(axis.size for axis in graph.axes) == [5, 8]
    assert not any(blocked.dim > 1 for blocked in graph.blocked)


def test_an_image_without_a_batch():
    graph = proved(nn.Sequential(Conv2d(3, 8, 3), nn.ReLU(), Conv2d(8, 2, 3)), torch.randn(3, 8, 8))
    assert axis_at(graph, "0.weight").size == 8


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_every_padding_mode(mode):
    net = nn.Sequential(
        Conv2d(3, 8, 3, padding=1, padding_mode=mode), Conv2d(8, 2, 3, padding="same", padding_mode=mode)
    )
    graph = proved(net, IMAGE)
    assert tied(graph, ("0.weight", 0), ("1.weight", 1))


def test_a_depthwise_convolution_follows_its_input():
    net = nn.Sequential(Conv2d(3, 8, 1), Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), Conv2d(8, 2, 1))
    graph = proved(net, IMAGE)
    (axis,) = graph.axes
    assert axis.exact
    assert tied(graph, ("0.weight", 0), ("1.weight", 0), ("1.bias", 0), ("2.running_mean", 0), ("3.weight", 1))


def test_a_depth_multiplier_is_channels_times_copies():
    net = nn.Sequential(Conv2d(3, 4, 1), Conv2d(4, 12, 3, groups=4), Conv2d(12, 2, 1))
    graph = proved(net, IMAGE)
    assert sizes_at(graph, "1.weight") == [4, 3]
    assert tied(graph, ("0.weight", 0))
    assert sizes_at(graph, "2.weight", 1) == [4, 3]


def test_a_grouped_convolution_is_groups_times_channels_of_a_group():
    net = nn.Sequential(Conv2d(3, 12, 1), Conv2d(12, 8, 3, groups=4), nn.ReLU(), Conv2d(8, 2, 1))
    graph = proved(net, IMAGE)
    assert sizes_at(graph, "0.weight") == [4, 3]
    assert sizes_at(graph, "1.weight") == [4, 2]
    assert sizes_at(graph, "1.weight", 1) == [3]
    assert {axis.name for axis in graph.axes if axis.size == 4} == {"0 groups"}


def test_grouped_convolutions_in_a_row_with_groups_of_different_number():
    net = nn.Sequential(Conv2d(3, 12, 1), Conv2d(12, 12, 3, groups=4), Conv2d(12, 12, 1, groups=2), Conv2d(12, 2, 1))
    graph = proved(net, IMAGE)
    assert sizes_at(graph, "1.weight")[0] == 2


def test_groups_without_a_common_refinement_are_blocked():
    net = nn.Sequential(Conv2d(3, 12, 1), Conv2d(12, 12, 3, groups=3), Conv2d(12, 12, 1, groups=4), Conv2d(12, 2, 1))
    graph = proved(net, IMAGE)
    assert "no common refinement" in reason(graph, "1.weight")


@pytest.mark.parametrize("groups", [2, 4], ids=["grouped", "one channel per group"])
def test_a_grouped_transposed_convolution(groups):
    net = nn.Sequential(
        Conv2d(3, 4, 1),
        nn.ConvTranspose2d(4, 8, 2, stride=2, groups=groups),
        nn.BatchNorm2d(8),
        Conv2d(8, 2, 1),
    )
    graph = proved(net, IMAGE)
    assert sizes_at(graph, "3.weight", 1) == [groups, 8 // groups]
    assert sizes_at(graph, "1.weight", 1) == [8 // groups]


def test_a_literal_number_of_groups_is_blocked():
    net = Net(
        lambda n, x: n.b(F.conv2d(n.a(x), n.w, groups=4)),
        a=Conv2d(3, 8, 1),
        w=weight(8, 2, 3, 3),
        b=Conv2d(8, 2, 1),
    )
    graph = proved(net, IMAGE)
    assert sizes_at(graph, "a.weight") == [2]
    assert sizes_at(graph, "b.weight", 1) == [2]


@pytest.mark.parametrize(
    "head",
    [
        lambda n, x: n.fc(x.flatten(1)),
        lambda n, x: n.fc(torch.flatten(x, start_dim=1)),
        lambda n, x: n.fc(x.view(x.size(0), -1)),
        lambda n, x: n.fc(x.reshape(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3])),
        lambda n, x: n.fc(x.view(-1, n.features)),
        lambda n, x: n.fc(nn.Flatten()(x)),
    ],
    ids=["flatten", "torch.flatten", "view", "reshape", "held", "module"],
)
def test_flatten_to_linear_is_channels_times_space(head):
    net = Net(lambda n, x: head(n, n.conv(x)), conv=Conv2d(3, 5, 3), fc=Linear(180, 2), features=180)
    graph = proved(net, IMAGE)
    assert tied(graph, ("conv.weight", 0), ("fc.weight", 1))
    assert axis_at(graph, "fc.weight", 1).size == 5


def test_a_literal_flatten_is_blocked_with_file_and_line():
    net = Net(lambda n, x: n.fc(n.conv(x).view(-1, 180)), conv=Conv2d(3, 5, 3), fc=Linear(180, 2))
    graph = proved(net, IMAGE)
    assert reason(graph, "conv.weight").startswith("180 is a literal at test_trace_convolution.py:")
    assert "hold it in an attribute" in reason(graph, "conv.weight")


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.LPPool2d(2, 2),
        nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.ZeroPad2d(1),
        nn.ReflectionPad2d(1), nn.Dropout2d(),
    ],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_space_changes_and_channels_stay(pool):
    graph = proved(nn.Sequential(Conv2d(3, 8, 3), pool, Conv2d(8, 2, 1)), IMAGE)
    assert tied(graph, ("0.weight", 0), ("2.weight", 1))


def test_a_normalisation_over_neighbouring_channels_blocks_them():
    graph = proved(nn.Sequential(Conv2d(3, 8, 3), nn.LocalResponseNorm(3), Conv2d(8, 2, 1)), IMAGE)
    assert reason(graph, "0.weight") == "avg_pool3d: takes it for a dimension of space"


def test_pixel_shuffle_takes_channels_apart():
    graph = proved(nn.Sequential(Conv2d(3, 20, 1), nn.PixelShuffle(2), Conv2d(5, 2, 1)), IMAGE)
    assert tied(graph, ("0.weight", 0), ("2.weight", 1))
    assert axis_at(graph, "0.weight").size == 5


def test_pixel_unshuffle_multiplies_channels():
    graph = proved(nn.Sequential(Conv2d(3, 5, 1), nn.PixelUnshuffle(2), Conv2d(20, 2, 1)), IMAGE)
    assert tied(graph, ("0.weight", 0), ("2.weight", 1))
    assert axis_at(graph, "0.weight").size == 5


def shuffle_by_hand(net, x):
    b, c, h, w = x.shape
    return x.view(b, net.groups, c // net.groups, h, w).transpose(1, 2).reshape(b, c, h, w)


@pytest.mark.parametrize("shuffle", [shuffle_by_hand, lambda n, x: F.channel_shuffle(x, n.groups)], ids=["view", "op"])
def test_channel_shuffle_is_a_product_in_another_order(shuffle):
    net = Net(lambda n, x: n.b(shuffle(n, n.a(x))), a=Conv2d(3, 12, 1), b=Conv2d(12, 2, 1), groups=3)
    graph = proved(net, IMAGE)
    assert sizes_at(graph, "a.weight") == [3, 4]
    assert sizes_at(graph, "b.weight", 1) == [4, 3]


def test_unfold_is_channels_times_kernel():
    net = Net(lambda n, x: n.b(F.unfold(n.a(x), 2, stride=2).transpose(1, 2)), a=Conv2d(3, 5, 1), b=Linear(20, 2))
    graph = proved(net, IMAGE)
    assert tied(graph, ("a.weight", 0), ("b.weight", 1))


def test_patches_merged_by_slicing_space():
    def run(n, x):
        x = n.a(x).permute(0, 2, 3, 1)
        corners = x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]
        return n.b(torch.cat(corners, -1))

    graph = proved(Net(run, a=Conv2d(3, 5, 1), b=Linear(20, 2)), IMAGE)
    assert tied(graph, ("a.weight", 0), ("b.weight", 1))


def test_a_sampling_grid_is_blocked_and_what_is_sampled_is_not():
    def run(n, x):
        return n.b(F.grid_sample(n.a(x), n.grid(x).permute(0, 2, 3, 1).tanh(), align_corners=False))

    graph = proved(Net(run, a=Conv2d(3, 8, 1), b=Conv2d(8, 3, 1), grid=Conv2d(3, 2, 1)), IMAGE)
    assert tied(graph, ("a.weight", 0), ("b.weight", 1))
    assert "coordinates" in reason(graph, "grid.weight")


def test_space_cannot_be_cut():
    net = Net(lambda n, x: n.conv(x + n.position), conv=Conv2d(3, 2, 3), position=weight(1, 3, 8, 8))
    graph = proved(net, IMAGE)
    assert graph.axes == ()
    assert reason(graph, "position", 2) == "a dimension of the model's input"


def test_a_weight_made_by_another_layer():
    def run(n, x):
        kernel = n.make(n.code).view(n.out, -1, 1, 1)
        return n.b(F.conv2d(n.a(x), kernel))

    net = Net(run, a=Conv2d(3, 4, 1), b=Conv2d(5, 2, 1), make=Linear(7, 20), code=weight(7), out=5)
    graph = proved(net, IMAGE)
    assert sizes_at(graph, "make.weight") == [5, 4]
    assert tied(graph, ("code", 0), ("make.weight", 1))


def test_zero_columns_of_a_convolution_in_groups_free_what_they_read():
    """Position 1 of each of the two groups is read by nobody, so the channels 1 and 5 can go."""
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 3, groups=2), nn.Conv2d(6, 2, 1))
    net[1].weight.data[:, 1] = 0
    x = torch.randn(2, 3, 7, 7)
    want = net(x)
    plan = sec.plan(sec.trace(net, x), sec.Zeros())
    assert plan.keep["0.weight"][0].tolist() == [0, 2, 3, 4, 6, 7]
    assert plan.keep["1.weight"][1].tolist() == [0, 2, 3]
    assert torch.allclose(sec.apply(net, plan)(x), want, atol=1e-6)
