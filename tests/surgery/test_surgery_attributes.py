"""The attributes that people read say what the weights are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import secateur as sec
from oracle import Net, each_axis


def cut(net: nn.Module, example: object, ratio: float = 0.5) -> nn.Module:
    graph = sec.trace(net, example)
    return sec.apply(net, sec.plan(graph, each_axis(graph, ratio)))


def test_linear_and_norms() -> None:
    norms = (nn.LayerNorm(8), nn.BatchNorm1d(8), nn.PReLU(8), nn.RMSNorm(8))
    net = nn.Sequential(nn.Linear(4, 8), *norms, nn.Linear(8, 2))
    cut(net, torch.randn(3, 4))
    assert (net[0].in_features, net[0].out_features) == (4, 4)
    assert net[1].normalized_shape == (4,)
    assert net[2].num_features == 4
    assert net[3].num_parameters == 4
    assert net[4].normalized_shape == (4,)
    assert (net[5].in_features, net[5].out_features) == (4, 2)


def test_convolutions() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.GroupNorm(2, 8),
        nn.ConvTranspose2d(8, 6, 3),
        nn.InstanceNorm2d(6, affine=True),
        nn.Conv2d(6, 2, 1),
    )
    cut(net, torch.randn(1, 3, 8, 8))
    assert net[0].out_channels == net[1].in_channels == net[1].out_channels == net[1].groups == net[2].num_channels
    assert net[2].num_groups == 1
    assert net[2].num_channels == net[3].in_channels == 2  # half of the groups, half of each
    assert net[3].out_channels == net[4].num_features == net[5].in_channels == 3


def test_grouped_convolution() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 1, groups=4), nn.Conv2d(12, 2, 1))
    cut(net, torch.randn(1, 3, 8, 8))
    middle = net[1]
    assert middle.groups == 2
    assert middle.in_channels == net[0].out_channels == middle.weight.shape[1] * 2
    assert middle.out_channels == net[2].in_channels == middle.weight.shape[0]
    assert middle.out_channels < 12


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent(kind: type[nn.RNNBase], gates: int) -> None:
    parts = {"first": nn.Linear(3, 8), "rnn": kind(8, 6, 2, batch_first=True), "out": nn.Linear(6, 2)}
    net = Net(lambda n, x: n.out(n.rnn(n.first(x))[0]), **parts)
    cut(net, torch.randn(2, 5, 3))
    assert (net.rnn.input_size, net.rnn.hidden_size) == (4, 3)
    assert net.rnn.weight_hh_l1.shape == (gates * 3, 3)
    assert net.out.in_features == 3


def test_recurrent_cell_and_embedding() -> None:
    parts = {"embedding": nn.Embedding(9, 8), "cell": nn.GRUCell(8, 6), "out": nn.Linear(6, 2)}
    net = Net(lambda n, i: n.out(n.cell(n.embedding(i))), **parts)
    cut(net, torch.randint(0, 9, (4,)))
    assert (net.embedding.num_embeddings, net.embedding.embedding_dim) == (9, 4)
    assert (net.cell.input_size, net.cell.hidden_size) == (4, 3)


def test_attention_of_ones_own_with_a_config() -> None:
    class Config:
        def __init__(self) -> None:
            self.heads, self.dims, self.kinds = 4, (2, 2), {"mlp": [16]}

    class Attention(nn.Module):
        def __init__(self, config: Config) -> None:
            super().__init__()
            self.config = config
            self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, self.config.heads, self.config.dims[0]).permute(2, 0, 3, 1, 4)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2)
            x = self.proj(out.reshape(b, t, self.config.heads * self.config.dims[1]))
            return self.down(self.up(x).view(b, t, self.config.kinds["mlp"][0]).relu())

    net = Attention(Config())
    cut(net, torch.randn(2, 5, 8))
    assert net.config.heads == 2
    assert net.config.dims == (1, 1)
    assert net.config.kinds == {"mlp": [8]}
    assert net.qkv.out_features == 3 * 2 * 1


def test_a_number_that_two_layers_share_fits_both() -> None:

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = 8
            self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x).view(-1, self.width)
            return self.c(self.b(x).view(-1, self.width))

    net = Shared()
    cut(net, torch.randn(4, 3))
    assert net.width == net.a.out_features == net.b.out_features == 4
