"""Which axes are free to rotate: an oracle that knows the architectures, and rotations that change nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import secateur as sec


class Bottleneck(nn.Module):
    """A linear bottleneck with a residual stream around it, as in MobileNetV2, and a code that two layers read."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.wide, self.narrow = nn.Conv2d(6, 12, 1), nn.Conv2d(12, 6, 3, padding=1)
        self.between = between
        self.one, self.two = nn.Conv2d(6, 4, 3, stride=2), nn.Conv2d(6, 4, 3, stride=2, bias=False)

    def forward(self, x):
        x = self.stem(x)
        x = self.between(x + self.narrow(self.wide(x).relu()))
        return self.one(x) + 2 * self.two(x)


def free(model, example) -> set[str]:
    return {found.axis.sites[0].tensor for found in sec.rotations(sec.trace(model, example)) if found.free}


def test_the_stream_of_linear_bottlenecks_is_free_unless_something_is_in_between() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9)
    assert free(Bottleneck(nn.Identity()), x) == {"stem.weight"}
    scale = nn.BatchNorm2d(6)
    scale.weight.data.uniform_(0.5, 2)
    for between in (
        nn.ReLU(),
        nn.Hardtanh(-1e2, 1e2),
        nn.Tanh(),
        scale,
        nn.Conv2d(6, 6, 1, groups=6),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.0),
    ):
        want = {"stem.weight"} if isinstance(between, nn.Dropout2d) else set()
        assert free(Bottleneck(between).eval(), x) == want, between


class Attention(nn.Module):
    """Two heads; something may be done to queries and keys."""

    def __init__(self, between=lambda x: x) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.between, self.scale = between, 8**-0.5

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        chances = (self.between(q) @ self.between(k).mT * self.scale).softmax(-1)
        return self.out((chances @ v).transpose(1, 2).flatten(2))


def test_queries_and_keys_are_free_together_unless_something_is_in_between() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    assert free(Attention(), x) == {"q.weight", "v.weight"}
    for between in (torch.relu, torch.tanh, lambda q: q.clamp(-50, 50), lambda q: q * torch.arange(1.0, 9.0)):
        assert free(Attention(between), x) == {"v.weight"}
    net = Attention().eval()
    before, held = net(x), {name: value.clone() for name, value in net.state_dict().items()}
    graph = sec.trace(net, x)
    found = next(r for r in sec.rotations(graph) if r.free and r.axis.sites[0].tensor == "q.weight")
    assert found.parts == 2
    sec.rotate(net, graph, found.axis, torch.linalg.qr(torch.randn(2, 8, 8))[0])
    assert torch.allclose(net(x), before, atol=1e-5)
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, held[name])}
    assert changed == {"q.weight", "q.bias", "k.weight", "k.bias"}


def llama():
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=2, tie_word_embeddings=True, **small))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval(), {"input_ids": torch.randint(0, 61, (2, 7))}


def test_values_of_attention_are_free_and_nothing_else_of_a_llama_is() -> None:
    model, example = llama()
    found = sec.rotations(sec.trace(model, example))
    assert [r.axis.sites[0].tensor for r in found if r.free] == [
        f"model.layers.{n}.self_attn.v_proj.weight" for n in range(2)
    ]
    assert all(r.axis.size == 8 for r in found if r.free)  # the dims of a head, not the heads
    assert all(r.why for r in found if not r.free)
    assert any("tied" in str(r) for r in found)


def test_a_rotation_changes_the_weights_and_not_the_output() -> None:
    model, example = llama()
    graph, before = sec.trace(model, example), model(**example).logits
    axis = next(r.axis for r in sec.rotations(graph) if r.free)
    matrix = torch.linalg.qr(torch.randn(8, 8))[0]
    weight, parameters = model.model.layers[0].self_attn.v_proj.weight.clone(), list(model.parameters())
    sec.rotate(model, graph, axis, matrix)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(model(**example).logits, before, atol=1e-5, rtol=1e-4)
    want = torch.einsum("ij,hjk->hik", matrix, weight.view(2, 8, 32)).reshape(16, 32)  # every head by itself
    torch.testing.assert_close(model.model.layers[0].self_attn.v_proj.weight, want)


def test_what_is_not_free_is_refused_and_the_model_is_as_it_was() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv1d(4, 6, 1), nn.MaxPool1d(2), nn.Conv1d(6, 2, 1)), torch.randn(5, 4, 8)
    graph, before = sec.trace(net, x), copy.deepcopy(net.state_dict())
    turned = torch.linalg.qr(torch.randn(6, 6))[0]
    for matrix, error, said in (
        (turned, sec.VerifyError, "as it was"),
        (2 * turned, sec.ApplyError, "orthogonal"),
        (turned[:5], sec.ApplyError, "orthogonal"),
    ):
        with pytest.raises(error, match=said):
            sec.rotate(net, graph, graph.axes[0], matrix)
        assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    with pytest.raises(sec.ApplyError, match="traced from"):
        sec.rotate(copy.deepcopy(net), graph, graph.axes[0], turned)
    net[1] = nn.ReLU()
    graph = sec.trace(net, x)
    with pytest.raises(sec.ApplyError, match="not linear"):
        sec.rotate(net, graph, graph.axes[0], turned)
