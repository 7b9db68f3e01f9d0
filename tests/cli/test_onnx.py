"""Export to ONNX, checked."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
import transformers
from torch import Tensor, nn

from secateur.onnx import OnnxError, export


class Two(nn.Module):
    """Two inputs by name, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"y": self.layer(x) * scale, "z": x + scale}


def test_named_inputs_and_several_outputs(tmp_path: Path) -> None:
    example = {"x": torch.randn(2, 4), "scale": torch.tensor(3.0)}
    assert export(Two().eval(), example, tmp_path / "two.onnx") < 1e-5
    assert [file.name for file in tmp_path.iterdir()] == ["two.onnx"]


def test_a_language_model_with_a_cache(tmp_path: Path) -> None:
    """The cache that it returns is state, no output."""
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    assert export(model, {"input_ids": torch.randint(50, (1, 8))}, tmp_path / "gpt.onnx") < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "gpt.onnx", providers=["CPUExecutionProvider"])
    assert [output.shape for output in session.get_outputs()] == [[1, 8, 50]]


class Asks(nn.Module):
    """Its control flow depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if float(x.sum()) > 0 else x - 1


def test_a_model_that_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(OnnxError, match=r"torch\.onnx cannot export Asks: "):
        export(Asks().eval(), torch.ones(2), tmp_path / "asks.onnx")
    assert not list(tmp_path.iterdir())


def test_a_model_that_computes_something_else_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 2).eval()
    real = torch.onnx.export

    def wrong(model: nn.Module, *args: object, **kwargs: object) -> object:
        other = nn.Linear(4, 2).eval()
        return real(other, *args, **kwargs)

    monkeypatch.setattr(torch.onnx, "export", wrong)
    with pytest.raises(OnnxError, match="output 0 of the exported model is off by"):
        export(layer, torch.ones(1, 4), tmp_path / "wrong.onnx")
