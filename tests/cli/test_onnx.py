"""Export to ONNX, checked."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
import transformers
from torch import Tensor, nn

import secateur as sec
from represented import represented
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


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}


def in_onnx(path: Path, example: dict[str, Tensor]) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.as_tensor(session.run(None, {name: tensor.numpy() for name, tensor in example.items()})[0])


@pytest.mark.parametrize("kind", represented(("Llama", "Bert"), by=("Llama",)))
def test_batch_and_length_may_vary(kind: str, tmp_path: Path) -> None:
    """A cut language model at sizes that neither the example nor the others had."""
    config = getattr(transformers, f"{kind}Config")(**SMALL, max_position_embeddings=64)
    model = getattr(transformers, {"Llama": "LlamaForCausalLM", "Bert": "BertModel"}[kind])(config).eval()
    example = {"input_ids": torch.randint(50, (1, 8))}
    sec.apply(model, sec.plan(sec.trace(model, example), sec.Params(0.7)))
    other = {"input_ids": torch.randint(50, (3, 11))}
    assert export(model, example, tmp_path / "net.onnx", others=[other]) < 1e-4
    for shape in ((2, 5), (5, 19)):
        given = {"input_ids": torch.randint(50, shape)}
        with torch.no_grad():
            want = model(**given)[0]
        assert (in_onnx(tmp_path / "net.onnx", given) - want).abs().max() < 1e-4 * want.abs().max()


def test_images_of_other_sizes(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)).eval()
    others = [torch.randn(2, 3, 24, 20)]
    export(net, torch.randn(1, 3, 16, 16), tmp_path / "net.onnx", others=others)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    assert [isinstance(size, str) for size in session.get_inputs()[0].shape] == [True, False, True, True]


def test_sizes_of_one_on_every_side_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OnnxError, match="at least 2 wherever sizes may vary"):
        export(nn.Linear(4, 2).eval(), torch.ones(1, 3, 4), tmp_path / "net.onnx", others=[torch.ones(3, 1, 4)])


def test_code_that_holds_on_to_a_size_is_refused(tmp_path: Path) -> None:
    class Literal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.shape[0] == 3 else 2 * self.layer(x)

    with pytest.raises(OnnxError, match=r"torch\.onnx cannot export Literal"):
        export(Literal().eval(), torch.ones(3, 4), tmp_path / "net.onnx", others=[torch.ones(5, 4)])
    assert not list(tmp_path.iterdir())
