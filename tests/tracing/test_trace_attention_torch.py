"""Torch's own attention module and layers, with everything that they offer."""

import pytest
import torch
from torch import nn
from torch.nn import Linear

from oracle import Net, axes_at, proved, sizes_at, tied

X = torch.randn(2, 5, 6)


def mha(**kwargs):
    return nn.MultiheadAttention(12, 3, **kwargs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_module_of_torch(batch_first, bias):
    net = Net(
        lambda n, x: n.o(n.m(h := n.a(x), h, h)[0]),
        a=Linear(6, 12),
        m=mha(batch_first=batch_first, bias=bias),
        o=Linear(12, 4),
    )
    graph = proved(net, X)
    assert sizes_at(graph, "m.out_proj.weight", 1) == [3, 4]
    assert sizes_at(graph, "m.in_proj_weight").count(3) == 1
    assert tied(graph, ("a.weight", 0), ("m.in_proj_weight", 1))
    assert tied(graph, ("m.out_proj.weight", 0), ("o.weight", 1))
    assert any(axis.name == "m heads" for axis in graph.axes)


@pytest.mark.parametrize(
    "extra",
    [
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"kdim": 7, "vdim": 8},
        {"kdim": 7, "vdim": 8, "add_bias_kv": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("weights", [True, False])
def test_the_module_of_torch_with_everything(extra, weights):
    def run(n, x):
        out, shown = n.m(n.q(x), n.k(x), n.v(x), need_weights=weights)
        return n.o(out) if shown is None else (n.o(out), shown)

    net = Net(
        run,
        q=Linear(6, 12),
        k=Linear(6, extra.get("kdim", 12)),
        v=Linear(6, extra.get("vdim", 12)),
        m=mha(**extra),
        o=Linear(12, 4),
    )
    graph = proved(net, X)
    assert sizes_at(graph, "m.out_proj.weight", 1) == [3, 4]
    if "kdim" in extra:
        assert tied(graph, ("k.weight", 0), ("m.k_proj_weight", 1))
        assert axes_at(graph, "m.q_proj_weight") == axes_at(graph, "m.k_proj_weight")
    if "add_bias_kv" in extra:
        assert sizes_at(graph, "m.bias_k", 2) == [3, 4]


@pytest.mark.parametrize(
    "mask",
    [torch.randn(5, 5), torch.randn(2 * 3, 5, 5), torch.ones(5, 5).triu(1).bool()],
    ids=["2d", "3d", "bool"],
)
def test_the_module_of_torch_with_masks(mask):
    hidden = torch.tensor([[False] * 4 + [True], [False] * 5])

    def run(n, x, mask, hidden):
        return n.o(n.m(x, x, x, attn_mask=mask, key_padding_mask=hidden)[0])

    net = Net(run, m=nn.MultiheadAttention(6, 3, batch_first=True), o=Linear(6, 4))
    graph = proved(net, (X, mask, hidden))
    assert sizes_at(graph, "m.out_proj.weight", 1) == ([2] if mask.ndim == 3 else [3, 2])


@pytest.mark.parametrize("first", [True, False])
def test_the_encoder_and_decoder_layers_of_torch(first):
    net = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 3, 10, norm_first=first, batch_first=True),
        2,
        enable_nested_tensor=False,
    )
    graph = proved(net, X)
    assert tied(graph, ("layers.0.linear1.weight", 0), ("layers.0.linear2.weight", 1))
    assert sizes_at(graph, "layers.1.self_attn.out_proj.weight", 1) == [3, 2]
    graph = proved(nn.TransformerDecoderLayer(6, 3, 10, norm_first=first, batch_first=True), (X, X))
    assert sizes_at(graph, "multihead_attn.out_proj.weight", 1) == [3, 2]
