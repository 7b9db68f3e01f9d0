"""MACs, parameters and bytes of a plan are those of the cut model, to the last one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import secateur as sec
from represented import represented
from zoo.architectures import build


def attention_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two products: queries with keys, weights with values."""
    b, h, t, d = query
    return 2 * b * h * t * key[2] * (d + value[3])


TAUGHT = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}


def counted(model: nn.Module, example: Any, taught: dict[Any, Any] | None = None) -> int:
    """Multiply-accumulates as torch's counter sees the model run."""
    args, kwargs = ((), example) if isinstance(example, dict) else ((example,), {})
    with FlopCounterMode(display=False, custom_mapping=taught or {}) as counter, torch.no_grad():
        model(*args, **kwargs)
    total = counter.get_total_flops()
    assert total % 2 == 0
    return total // 2


def figures(model: nn.Module, example: Any, taught: dict[Any, Any] | None = None) -> tuple[int, int, int]:
    parameters = list(model.parameters())
    size = sum(p.numel() * p.element_size() for p in parameters)
    return counted(model, example, taught), sum(p.numel() for p in parameters), size


def agrees(model: nn.Module, example: Any, taught: dict[Any, Any] | None = None, ratio: float = 0.4) -> None:
    model.eval()
    plan = sec.plan(sec.trace(model, example), sec.Ratio(ratio), importance=sec.Random(0))
    assert (plan.macs.before, plan.params.before, plan.bytes.before) == figures(model, example, taught)
    assert sec.macs(model, example) == plan.macs.before
    sec.apply(model, plan, verify=False)
    assert (plan.macs.after, plan.params.after, plan.bytes.after) == figures(model, example, taught)
    assert plan.macs.after < plan.macs.before


@pytest.mark.parametrize(
    "name",
    represented(
        (
            "torchvision resnet18",
            "torchvision mobilenet_v2",
            "torchvision shufflenet_v2_x0_5",
            "torchvision squeezenet1_1",
            "timm resnext50_32x4d",
            "timm test_convnext",
        ),
        by=("torchvision shufflenet_v2_x0_5", "timm test_convnext"),
    ),
)
def test_convolutional_networks(name: str) -> None:
    model, _ = build(name)
    agrees(model, torch.randn(1, 3, 64, 64) if "timm test" not in name else torch.randn(1, 3, 160, 160))


@pytest.mark.parametrize(
    "name", represented(("timm test_vit", "transformers gpt2", "transformers llama"), by=("transformers llama",))
)
def test_attention(name: str) -> None:
    model, example = build(name)
    agrees(model, example, TAUGHT)


def test_transposed_grouped_and_pointwise_layers() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.ConvTranspose2d(8, 12, 3, stride=2, groups=4),
        nn.GroupNorm(2, 12),
        nn.Conv2d(12, 12, 3, groups=12, dilation=2),
        nn.Conv2d(12, 2, 1),
    )
    agrees(net, torch.randn(2, 3, 16, 16))


def test_bilinear_and_shared_layers() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("ni,nj->ij", self.b(self.b(self.a(x))).relu(), x)[:1].sum()

    agrees(Shared(), torch.randn(3, 4))


def test_recurrent_layers() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rnn, self.out = nn.Linear(3, 8), nn.LSTM(8, 6, 2), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.rnn(self.first(x))[0])

    net, x = Tagger(), torch.randn(5, 2, 3)
    plan = sec.plan(sec.trace(net, x), sec.Ratio(0.5))
    steps = 5 * 2
    assert plan.macs.before == steps * (3 * 8 + 24 * (8 + 6) + 24 * (6 + 6) + 6 * 2)
    assert plan.macs.after == steps * (3 * 4 + 12 * (4 + 3) + 12 * (3 + 3) + 3 * 2)


def test_low_precision_and_tied_weights_count_bytes_once() -> None:
    embedding, out = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    out.weight = embedding.weight
    net = nn.Sequential(embedding, nn.Linear(8, 8), nn.ReLU(), out).bfloat16()
    plan = sec.plan(sec.trace(net, torch.randint(0, 10, (2, 3))), sec.Ratio(0.5))
    assert plan.bytes.before == 2 * (10 * 8 + 8 * 8 + 8)
    sec.apply(net, plan)
    assert plan.bytes.after == sum(p.numel() * 2 for p in net.parameters())
