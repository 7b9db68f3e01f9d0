"""OpenVINO converts a cut model, which then computes the same on sizes that it has not seen."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import transformers
from torch import nn

import secateur as sec

pytestmark = pytest.mark.ecosystem


def resnet() -> tuple[nn.Module, Any, list[Any]]:
    others = [torch.rand(1, 3, 96, 64), torch.rand(3, 3, 64, 64)]
    return timm.create_model("test_resnet").eval(), torch.rand(2, 3, 64, 96), others


def bert() -> tuple[nn.Module, Any, list[Any]]:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    return transformers.BertModel(config).eval(), _words(2, 9), [_words(1, 5), _words(3, 17)]


def _words(batch: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, -2:] = 0
    return {"input_ids": torch.randint(64, (batch, length)), "attention_mask": mask}


@pytest.mark.parametrize("make", [resnet, bert])
def test_other_sizes(make: Any) -> None:
    openvino = pytest.importorskip("openvino")
    torch.manual_seed(0)
    model, example, others = make()
    plan = sec.plan(sec.trace(model, example), sec.Ratio(0.5))
    assert plan.params.after < 0.8 * plan.params.before
    sec.apply(model, plan)
    ready = openvino.compile_model(openvino.convert_model(model, example_input=example), "CPU")
    assert ready.input(0).partial_shape.is_dynamic
    for inputs in (example, *others):
        with torch.no_grad():
            want = model(**inputs)[0] if isinstance(inputs, dict) else model(inputs)
        given = inputs if isinstance(inputs, dict) else {0: inputs}
        got = torch.from_numpy(ready({name: tensor.numpy() for name, tensor in given.items()})[0])
        assert got.shape == want.shape
        assert torch.allclose(got, want, atol=1e-3 * want.abs().max().item())
