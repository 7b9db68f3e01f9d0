"""Torch's own attention with fewer heads, or of other widths, than its code can express."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from oracle import Net, difference, outputs, randomised, zeroed
from secateur.nn import MultiheadAttention

TOKENS = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def attending(**options: Any) -> Net:
    attention = nn.MultiheadAttention(8, 4, **options)

    def run(n: Net, x: Tensor) -> Tensor:
        return n.head(n.attention(x, x, x, need_weights=False)[0])

    return Net(run, attention=attention, head=nn.Linear(8, 3))


def cut_heads(net: nn.Module, example: Any = TOKENS, ratio: float = 0.5, **keywords: Any) -> tuple[nn.Module, sec.Plan]:
    small = copy.deepcopy(net)
    graph = sec.trace(small, example)
    target = sec.Ratio({axis.name: ratio for axis in graph.axes if axis.name.endswith("heads")})
    plan = sec.plan(graph, target, **keywords)
    assert plan.axes
    return sec.apply(small, plan), plan


@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": True},
        {"batch_first": False},
        {"batch_first": True, "bias": False},
        {"batch_first": True, "add_bias_kv": True},
        {"batch_first": True, "add_zero_attn": True},
        {"batch_first": True, "dropout": 0.2},
        {"batch_first": True, "kdim": 8, "vdim": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("ratio", [0.5, 0.25, 0.75])
def test_fewer_heads_compute_what_zeroed_heads_do(options: dict[str, Any], ratio: float) -> None:
    net = randomised(attending(**options))
    small, plan = cut_heads(net, ratio=ratio)
    heads = round(4 * (1 - ratio))
    assert isinstance(small.attention, MultiheadAttention)
    assert (small.attention.num_heads, small.attention.head_dim, small.attention.embed_dim) == (heads, 2, 8)
    assert small.attention.out_proj.weight.shape == (8, 2 * heads)
    assert difference(outputs(small, TOKENS), outputs(zeroed(net, plan.kept), TOKENS)) < 1e-12


def test_the_replacement_is_used_only_where_it_must_be() -> None:
    net = Net(lambda n, x: n.head(n.attention(x, x, x)[0]), attention=nn.MultiheadAttention(8, 4), head=nn.Linear(8, 3))
    plan = sec.plan(
        sec.trace(net, TOKENS.float()), sec.Ratio({"attention.out_proj": 0.5}), protect=["attention.in_proj*"]
    )
    sec.apply(net, plan)
    assert type(net.attention) is nn.MultiheadAttention or net.attention.out_proj.weight.shape[0] != 8


def test_key_and_value_widths_of_their_own() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        return n.head(n.attention(n.q(x), n.k(x), n.v(x), need_weights=False)[0])

    net = Net(
        run,
        attention=nn.MultiheadAttention(8, 4, kdim=6, vdim=10, batch_first=True),
        q=nn.Linear(8, 8),
        k=nn.Linear(8, 6),
        v=nn.Linear(8, 10),
        head=nn.Linear(8, 3),
    )
    net = randomised(net)
    small = copy.deepcopy(net)
    plan = sec.plan(sec.trace(small, TOKENS), sec.Ratio(0.5), exact=True)
    sec.apply(small, plan)
    assert (small.attention.kdim, small.attention.vdim, small.attention.num_heads) == (3, 5, 2)
    assert difference(outputs(small, TOKENS), outputs(zeroed(net, plan.kept), TOKENS)) < 1e-12


def test_an_input_narrower_than_the_output() -> None:
    """Only what feeds the attention is cut: torch's module would insist on its full width."""
    net = randomised(nn.Sequential(nn.Linear(8, 8), attending(batch_first=True)))
    small = copy.deepcopy(net)
    graph = sec.trace(small, TOKENS)
    plan = sec.plan(graph, sec.Ratio({"0 features": 0.5}))
    sec.apply(small, plan)
    assert small[1].attention.in_proj_weight.shape == (24, 4)
    assert small[1].attention.out_proj.weight.shape == (8, 8)
    assert difference(outputs(small, TOKENS), outputs(zeroed(net, plan.kept), TOKENS)) < 1e-12


def test_masks_and_shown_weights_have_the_right_heads() -> None:
    attention = nn.MultiheadAttention(8, 4, batch_first=True)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def run(n: Net, x: Tensor) -> Any:
        out, shown = n.attention(x, x, x, key_padding_mask=padding, attn_mask=mask, average_attn_weights=True)
        return n.head(out), shown.sum(-1)

    net = randomised(Net(run, attention=attention, head=nn.Linear(8, 3)))
    small, _ = cut_heads(net)
    assert small.attention.num_heads == 2
    out, total = small(TOKENS)
    assert torch.allclose(total, torch.ones(2, 5, dtype=torch.float64))
    changed = TOKENS.clone()
    changed[:, -1] += 1
    assert torch.equal(small(changed)[0][:, :-1], out[:, :-1])  # causal: the last token tells the others nothing


LAYERS = {
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 4, 16, batch_first=True),
    "encoder layer, norm first": lambda: nn.TransformerEncoderLayer(8, 4, 16, batch_first=True, norm_first=True),
    "encoder layer, sequence first": lambda: nn.TransformerEncoderLayer(8, 4, 16),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 16, batch_first=True), 2),
    "decoder": lambda: Net(
        lambda n, x: n.decoder(x, x * 0.5),
        decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 4, 16, batch_first=True), 2),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_inside_of_torch_s_transformer_layers(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(LAYERS[name](), nn.Linear(8, 3)).eval()
    example = TOKENS.float()
    small = copy.deepcopy(net)
    plan = sec.plan(sec.trace(small, example), sec.Ratio(0.5))
    sec.apply(small, plan)
    attentions = [m for m in small.modules() if isinstance(m, nn.MultiheadAttention)]
    assert attentions
    assert all(m.num_heads == 2 for m in attentions)
    small.eval()
    slow = small(example)  # gradients on: torch takes no shortcut
    with torch.no_grad():
        assert torch.allclose(small(example), slow, atol=1e-5)
    with torch.inference_mode():
        assert torch.allclose(small(example), slow, atol=1e-5)
    small.train()
    small(example).sum().backward()
    assert all(p.grad is not None for p in small.parameters())


def test_an_encoder_with_padding_keeps_off_torch_s_nested_tensors() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 16, batch_first=True), 2).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    example = {"src": TOKENS.float(), "src_key_padding_mask": padding}
    plan = sec.plan(sec.trace(encoder, example), sec.Ratio(0.5))
    sec.apply(encoder, plan)
    slow = encoder(**example)
    with torch.no_grad():
        fast = encoder(**example)
    assert torch.allclose(fast[0], slow[0], atol=1e-5)
    assert torch.allclose(fast[1, :3], slow[1, :3], atol=1e-5)
