"""Every product with a parameter is seen, and is what it says it is."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import secateur as sec
from secateur.calibrate import Watch, calibrating, call


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.attention(x, x + 1, x)[0]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 10))
        self.down = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x):
        gate, up = torch.bmm(x.expand(3, *x.shape), self.up).chunk(2, -1)
        return torch.einsum("eni,eoi->eno", gate.sigmoid() * up, self.down)


CASES = {
    "experts": (Experts(), (7, 4)),
    "linear": (nn.Linear(4, 5), (3, 2, 4)),
    "linear-without-bias": (nn.Linear(4, 5, bias=False), (3, 4)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=2, dilation=2), (2, 4, 9)),
    "conv2d-grouped": (nn.Conv2d(6, 4, 3, padding=1, stride=2, groups=2), (2, 6, 7, 8)),
    "conv2d-depthwise": (nn.Conv2d(6, 6, (3, 2), padding=(1, 0), dilation=(1, 2), groups=6), (2, 6, 7, 8)),
    "conv3d": (nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
    "transposed-grouped": (nn.ConvTranspose2d(6, 4, 3, 2, 1, 1, groups=2), (2, 6, 7, 8)),
    "transposed-dilated": (nn.ConvTranspose1d(6, 4, 4, stride=3, padding=1, dilation=2), (2, 6, 7)),
    "packed-attention": (SelfAttention(), (3, 1, 8)),
    "lstm": (nn.LSTM(4, 5), (3, 2, 4)),
}


def products(model, example):
    found = []

    def note(product, run):
        out = run()
        found.append((product, out.clone()))  # an LSTM adds to it in place
        return out

    with calibrating(model), Watch(model, note) as watch:
        call(model, example)
    return found, watch.parameters.tensors


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_rows_times_weight_are_outputs(case: str) -> None:
    model, shape = CASES[case]
    found, tensors = products(model, torch.randn(shape))
    assert found
    for product, out in found:
        every = product.of.sample(10**9)
        rows, outputs = torch.cat(list(product.of.rows(every)), 1), torch.cat(list(product.of.outputs(out, every)), 1)
        made = rows @ product.weight.mT + (0 if product.shift is None else product.shift)
        torch.testing.assert_close(made, outputs, atol=1e-5, rtol=1e-5)
        whole, zero = tensors[product.name], torch.zeros(1, 1, 1, dtype=torch.long)
        at = [product.index.get(d, zero).expand(product.weight.shape) for d in range(whole.ndim)]
        assert torch.equal(whole[tuple(at)], product.weight)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_what_is_written_is_read(case: str) -> None:
    model, shape = CASES[case]
    found, _ = products(model, torch.randn(shape))
    for product, _ in found:
        values = torch.randn(product.weight.shape)
        product.write(values)
        assert torch.equal(product.weight, values)


@torch.no_grad()
def test_a_sample_takes_the_same_rows_of_inputs_and_outputs() -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    ((product, out),), _ = products(conv, torch.randn(8, 3, 16, 16))
    some = product.of.sample(100, offset=1)
    rows, outputs = torch.cat(list(product.of.rows(some)), 1), torch.cat(list(product.of.outputs(out, some)), 1)
    assert 50 <= rows.shape[1] <= 400
    torch.testing.assert_close(rows @ product.weight.mT + product.shift, outputs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "convnext_atto", "mobilenetv3_small_050"])
def test_every_layer_of_a_real_model_is_seen_once(name: str) -> None:
    model = timm.create_model(name)
    size = 224 if "vit" in name else 64
    found, _ = products(model, torch.randn(1, 3, size, size))
    layers = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert sorted(product.name for product, _ in found) == sorted(layers)


def test_what_is_added_to_a_matrix_is_not_refitted() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 12), nn.Linear(8, 3)
            self.weight, self.matrix = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(5, 8))

        def forward(self, x):
            return self.last(torch.addmm(self.matrix, self.first(x).relu(), self.weight).relu())

    model = Added()
    found, _ = products(model, torch.randn(5, 6))
    assert [product.name for product, _ in found] == ["first.weight", "last.weight"]
    batches = [torch.randn(5, 6) for _ in range(20)]
    plan = sec.plan(sec.trace(model, batches[0]), sec.Ratio(0.5))
    outcome = sec.outcome(sec.apply(model, plan, compensate=sec.LeastSquares(batches)))
    assert outcome is not None
    assert "weight was not refitted" in outcome.notes[0]
