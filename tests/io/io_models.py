"""Small real models of every kind, each with the input that it is called with."""

from collections.abc import Callable
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import secateur as sec
from oracle import each_axis


class LSTMClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0][:, -1])


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.out = nn.Linear(16, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.out(h + self.down(torch.relu(self.up(h))))


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


_IDS = torch.arange(14).reshape(2, 7)

MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "resnet18": (torchvision.models.resnet18, _draw(1, 3, 32, 32)),
    "mobilenet_v2": (torchvision.models.mobilenet_v2, _draw(1, 3, 32, 32)),
    "test_vit": (lambda: timm.create_model("test_vit"), _draw(1, 3, 160, 160)),
    "llama": (llama, {"input_ids": _IDS}),
    "encoder": (encoder, _draw(2, 5, 32)),
    "lstm": (LSTMClassifier, _IDS),
    "tied": (TiedEmbedding, _IDS),
    "perceptron": (perceptron, _draw(3, 4)),
}


def run(model: nn.Module, example: Any) -> Tensor:
    """The model's output in evaluation mode."""
    model.eval()
    with torch.no_grad():
        out = model(**example) if isinstance(example, dict) else model(example)
    return out if isinstance(out, Tensor) else out.logits


def cut(model: nn.Module, example: Any, ratio: float = 0.5) -> nn.Module:
    graph = sec.trace(model, example)
    return sec.apply(model, sec.plan(graph, each_axis(graph, ratio)), verify=False)


def facts(model: nn.Module) -> dict[str, Any]:
    """Every int, flag and text that the modules hold, and their kinds: what a load must rebuild besides weights."""
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in {**vars(module), "kind": type(module)}.items()
        if isinstance(value, int | float | str | type)
    }
