"""Beyond the chains of `torch.ao`: wherever rows are removed, the model computes what it did while they were masked."""

from __future__ import annotations

import math

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from removal_models import masked, prune_like_masked, random_norms
from torch import Tensor, nn

import secateur as sec
from secateur import ao
from secateur.pipeline.apply import plan_of

BOTH = pytest.mark.parametrize("prune_bias", [True, False])
IMAGE = (2, 3, 10, 10)


def size(model: nn.Module) -> int:
    return sum(tensor.numel() for tensor in model.parameters())


@BOTH
def test_through_batch_norm(prune_bias: bool) -> None:
    """A masked channel leaves batch norm as a constant, which the next layer's bias takes over."""
    layers = (nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3, bias=False))
    model = random_norms(nn.Sequential(*layers, nn.BatchNorm2d(5), nn.Sigmoid(), nn.Conv2d(5, 4, 1)))
    pruner = prune_like_masked(
        model, {"0.weight": [0, 2, 5], "3.weight": [1]}, torch.randn(IMAGE), prune_bias=prune_bias
    )
    assert pruner.removal == type(pruner.removal)({"0.weight": 3, "3.weight": 1})
    assert model[1].running_mean.shape == (3,)
    assert model[3].weight.shape == (4, 3, 3, 3)
    assert model[3].bias.shape == (4,)  # was none: holds what channels 0, 2 and 5 carried


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = nn.Linear(4, 6), nn.Linear(6, 8)
        self.back, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.back(F.gelu(self.inner(x))))


@BOTH
def test_residual_stream_goes_where_all_that_feed_it_are_off(prune_bias: bool) -> None:
    model = Residual()
    off = {"stem.weight": [0, 1, 4], "back.weight": [1, 4, 5], "inner.weight": [7]}
    pruner = prune_like_masked(model, off, torch.randn(5, 4), prune_bias=prune_bias)
    assert pruner.removal.removed == {"stem.weight": 2, "back.weight": 2, "inner.weight": 1}
    assert [name for name, _ in pruner.kept_masked] == ["stem.weight", "back.weight"]
    assert all("1 of 6 rows" in reason for _, reason in pruner.kept_masked)
    assert (model.head.in_features, model.inner.in_features, model.inner.out_features) == (4, 4, 7)


@BOTH
def test_a_channel_that_an_unmasked_layer_feeds_stays(prune_bias: bool) -> None:
    model = Residual()
    before = size(model)
    pruner = prune_like_masked(model, {"back.weight": [2]}, torch.randn(5, 4), prune_bias=prune_bias)
    assert size(model) == before
    assert [name for name, _ in pruner.kept_masked] == ["back.weight"]
    assert model.back.weight[2].eq(0).all()


def test_a_channel_that_is_fed_only_on_other_inputs_stays() -> None:
    """The other layer is silent on any likely input: its bias keeps the activation at zero."""

    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.rare, self.b = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
            self.rare.bias.data.fill_(-1e3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) + F.relu(self.rare(x)))

    model = Rare()
    pruner = prune_like_masked(model, {"a.weight": [2]}, torch.randn(5, 4), prune_bias=False)
    assert pruner.removal.removed == {}
    rare = 1e6 * torch.randn(5, 4)
    assert model(rare).abs().max() > 1e3  # it does matter


@BOTH
def test_concatenation(prune_bias: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 5, 3), nn.Conv2d(9, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.cat([F.relu(self.a(x)), torch.tanh(self.b(x))], 1))

    model = Net()
    prune_like_masked(model, {"a.weight": [3], "b.weight": [0, 2]}, torch.randn(IMAGE), prune_bias=prune_bias)
    assert model.c.weight.shape == (4, 6, 1, 1)


@BOTH
def test_depthwise_convolution(prune_bias: bool) -> None:
    layers = (nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.ReLU(), nn.Conv2d(6, 4, 1))
    model = nn.Sequential(*layers)
    pruner = prune_like_masked(model, {"0.weight": [1, 2]}, torch.randn(IMAGE), prune_bias=prune_bias)
    assert pruner.kept_masked == ()
    assert (model[2].groups, model[2].weight.shape[0], model[4].in_channels) == (4, 4, 4)


def test_depthwise_convolution_that_pads_a_constant_keeps_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6, padding=1), nn.Conv2d(6, 4, 1))
    pruner = prune_like_masked(model, {"0.weight": [1]}, torch.randn(IMAGE), prune_bias=False)
    assert pruner.removal.removed == {}
    assert [name for name, _ in pruner.kept_masked] == ["0.weight"]


def test_squeeze_and_excitation() -> None:
    """The gate of a masked channel does not matter: it is multiplied by zero."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.squeeze, self.gate = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
            self.b = nn.Conv2d(6, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.b(x * torch.sigmoid(self.gate(F.relu(self.squeeze(x.mean((2, 3), keepdim=True))))))

    model = Net()
    pruner = prune_like_masked(model, {"a.weight": [0, 5]}, torch.randn(IMAGE))
    assert pruner.removal.removed == {"a.weight": 2}
    assert (model.gate.out_channels, model.squeeze.in_channels) == (4, 4)


def test_a_product_is_zero_where_one_factor_is() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x))

    model = Gated()
    pruner = prune_like_masked(model, {"gate.weight": [0, 1], "up.weight": [1, 2]}, torch.randn(5, 4))
    assert pruner.kept_masked == ()
    assert (model.gate.out_features, model.up.out_features, model.down.in_features) == (3, 3, 3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(8)
        return self.o(scores.softmax(-1) @ self.v(x))


def test_attention_projections() -> None:
    off = {"q.weight": [0, 3], "k.weight": [0, 3], "v.weight": [1]}
    model = Attention()
    assert prune_like_masked(model, off, torch.randn(2, 5, 8)).kept_masked == ()
    assert (model.q.out_features, model.k.out_features, model.v.out_features, model.o.in_features) == (4, 4, 5, 5)


def test_attention_values_leave_their_bias_in_the_output_projection_but_queries_cannot() -> None:
    off = {"q.weight": [0], "k.weight": [0], "v.weight": [1]}
    model = Attention()
    pruner = prune_like_masked(model, off, torch.randn(2, 5, 8), prune_bias=False)
    assert pruner.removal.removed == {"v.weight": 1}
    assert [name for name, _ in pruner.kept_masked] == ["q.weight", "k.weight"]


def test_layer_norm_counts_masked_channels_so_they_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    pruner = prune_like_masked(model, {"0.weight": [1]}, torch.randn(5, 4))
    assert pruner.removal.removed == {}
    assert "layer_norm" in pruner.kept_masked[0][1]


@pytest.mark.parametrize("dims", [1, 3])
@BOTH
def test_convolutions_of_one_and_three_dimensions(dims: int, prune_bias: bool) -> None:
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    model = nn.Sequential(conv(2, 5, 3), nn.GELU(), conv(5, 4, 3, bias=False), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(2, 2, *[7] * dims)
    model(x)
    pruner = prune_like_masked(model, {"0.weight": [4], "2.weight": [0, 1]}, x, prune_bias=prune_bias)
    assert pruner.removal.removed == {"0.weight": 1, "2.weight": 2}


def test_a_layer_that_is_used_twice_takes_the_constant_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x))) + self.b(F.relu(self.a(-x)))

    model = Twice()
    model.a.bias.data[2] = 1.0
    assert prune_like_masked(model, {"a.weight": [2]}, torch.randn(5, 4), prune_bias=False).kept_masked == ()
    assert model.b.in_features == 5


def test_all_rows_off_leaves_one() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    pruner = prune_like_masked(model, {"0.weight": [0, 1, 2]}, torch.randn(5, 4))
    assert model[0].weight.shape == (1, 4)
    assert "one must stay" in pruner.kept_masked[0][1]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_masks_on_a_small_network(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    bias, prune_bias = data.draw(st.booleans()), data.draw(st.booleans())
    middle = data.draw(st.sampled_from([nn.ReLU(), nn.SiLU(), nn.BatchNorm1d(5), nn.Identity(), nn.Dropout()]))
    model = random_norms(
        nn.Sequential(nn.Linear(3, 5, bias=bias), middle, nn.Linear(5, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2))
    )
    rows = {"0.weight": 5, "2.weight": 4}
    off = {name: data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n - 1)) for name, n in rows.items()}
    pruner = prune_like_masked(model, off, torch.randn(4, 3), prune_bias=prune_bias)
    assert pruner.removal.removed == {name: len(gone) for name, gone in off.items() if gone}


@BOTH
def test_resnet18(prune_bias: bool) -> None:
    model = random_norms(torchvision.models.resnet18(weights=None))
    before = size(model)
    off = {f"layer{i}.{j}.conv1.weight": range(0, 64, 3) for i in (1, 2, 3, 4) for j in (0, 1)}
    pruner = prune_like_masked(model, off, torch.randn(1, 3, 32, 32), prune_bias=prune_bias)
    assert size(model) < before
    kept = {name: int(reason.partition(" ")[0]) for name, reason in pruner.kept_masked}
    assert all(kept.get(name, 0) + pruner.removal.removed.get(name, 0) == 22 for name in off)


def test_vision_transformer() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
    pruner = ao.SaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(model, [{"tensor_fqn": f"blocks.{i}.mlp.fc1.weight", "prune_bias": False} for i in (0, 1)])
    pruner.step()
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        want = model(x)
        torch.testing.assert_close(pruner.prune()(x), want, rtol=1e-4, atol=1e-5)
    assert (pruner.kept_masked, pruner.removal.inexact) == ((), ())
    assert model.blocks[1].mlp.fc2.in_features == 384


def test_a_recurrent_reader_takes_the_constant() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6)
            self.rnn, self.out = nn.LSTM(6, 5, batch_first=True, bidirectional=True), nn.Linear(10, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(self.norm(self.conv(x)).transpose(1, 2))[0])

    model = random_norms(Net())
    assert prune_like_masked(model, {"conv.weight": [0, 4]}, torch.randn(2, 3, 9)).kept_masked == ()
    assert model.rnn.input_size == 4


def test_the_remembered_plan_is_that_of_the_model() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)), torch.randn(2, 3, 8, 8)
    before = (sec.macs(model, x), size(model), 4 * size(model))
    masked(model, {"0.weight": [0], "2.weight": [1]}).prune(example=x)
    plan = plan_of(model)
    assert plan is not None
    assert (plan.macs.before, plan.params.before, plan.bytes.before) == before
    assert (plan.macs.after, plan.params.after, plan.bytes.after) == (sec.macs(model, x), size(model), 4 * size(model))
    assert plan.keep["2.weight"][1].tolist() == [1, 2, 3, 4, 5]


def test_a_pruned_model_trains_and_is_saved(tmp_path: object) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    model, x = build(), torch.randn(5, 4)
    masked(model, {"0.weight": [1, 2], "2.weight": [0]}, prune_bias=False).prune()
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    sec.save(model, f"{tmp_path}/small.safetensors")
    torch.testing.assert_close(sec.load(f"{tmp_path}/small.safetensors", build())(x), model(x))
