"""What torch makes of a cut model: `torch.export` and `torch.compile` take it as they take any other."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import secateur as sec

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


def vit() -> tuple[nn.Module, Any]:
    return timm.create_model("test_vit").eval(), torch.randn(2, 3, 160, 160)


def llama() -> tuple[nn.Module, Any]:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=50, use_cache=False)
    return transformers.LlamaForCausalLM(config).eval(), {"input_ids": torch.randint(50, (2, 9))}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.LSTM(6, 16, 2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x)[0][:, -1])


MODELS = {"vit": vit, "llama": llama, "lstm": lambda: (Recurrent().eval(), torch.randn(2, 5, 6))}


def output(model: Any, example: Any) -> Tensor:
    with torch.no_grad():
        out = model(**example) if isinstance(example, dict) else model(example)
    return out if isinstance(out, Tensor) else out[0]


@pytest.fixture(params=MODELS)
def cut(request: pytest.FixtureRequest) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, example = MODELS[request.param]()
    sec.apply(model, sec.plan(sec.trace(model, example), sec.Params(0.6)))
    return model, example


def test_export(cut: tuple[nn.Module, Any]) -> None:
    model, example = cut
    args, kwargs = ((), example) if isinstance(example, dict) else ((example,), {})
    program = torch.export.export(model, args, kwargs)
    assert torch.allclose(output(program.module(), example), output(model, example), atol=1e-5)
    held = {name: tuple(tensor.shape) for name, tensor in program.state_dict.items()}
    assert held == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name in held}


def test_compile(cut: tuple[nn.Module, Any]) -> None:
    model, example = cut
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.allclose(output(compiled, example), output(model, example), atol=1e-5)
