"""What a model shares with others is not written to: it gets a copy of its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import secateur as sec
from oracle import each_axis
from secateur.pipeline import apply as apply_module
from state.reachable import FrozenDict, reachable

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


@dataclass
class Config:
    heads: int = 4
    head_dim: int = 2
    widths: dict[str, list[int]] = field(default_factory=lambda: {"mlp": [16]})

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, self.head_dim)


class Attention(nn.Module):
    """Reads the config itself, through a helper that holds it, a method of it, a partial and a closure."""

    def __init__(self, config: Any, helper: Any) -> None:
        super().__init__()
        self.config, self.helper = config, helper
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.split = config.split
        self.join = functools.partial(_join, config=config)
        self.merge = lambda x: x.reshape(*x.shape[:-1], 3, config.heads * config.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.merge(self.qkv(x)).unbind(-2)
        q, k, v = (self.split(part).transpose(-2, -3) for part in (q, k, v))
        out = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        assert self.helper.config.heads == out.shape[-3]
        return self.proj(self.join(out.transpose(-2, -3)))


def _join(x: Tensor, config: Any) -> Tensor:
    return x.reshape(*x.shape[:-2], config.heads * config.head_dim)


class Model(nn.Module):
    def __init__(self, config: Any, helper: Any) -> None:
        super().__init__()
        self.config, self.all = config, (config, [helper])
        self.attention = Attention(config, helper)
        self.up, self.down = nn.Linear(8, config.widths["mlp"][0]), nn.Linear(config.widths["mlp"][0], 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return self.down(self.up(x).view(*x.shape[:-1], self.config.widths["mlp"][0]).relu())


def pair() -> tuple[Config, Any, Model, Model]:
    torch.manual_seed(0)
    config = Config()
    helper = SimpleNamespace(config=config)
    return config, helper, Model(config, helper), Model(config, helper).eval()


def test_a_teacher_of_the_same_config_stays_as_it_is() -> None:
    config, helper, net, teacher = pair()
    before = teacher(X)
    seen = reachable(teacher, config, helper)
    graph = sec.trace(net, X)
    sec.apply(net, sec.plan(graph, each_axis(graph, 0.5)))
    assert reachable(teacher, config, helper) == seen
    assert torch.equal(teacher(X), before)
    assert config == Config()
    assert Model(config, helper).up.out_features == 16
    assert (net.config.heads, net.config.head_dim, net.config.widths) == (2, 1, {"mlp": [8]})


def test_what_is_one_object_in_the_model_stays_one() -> None:
    config, helper, net, _ = pair()
    sec.apply(net, sec.plan(sec.trace(net, X), sec.Ratio(0.5)))
    own = net.config
    assert own is not config
    assert own is net.all[0] is net.attention.config is net.attention.helper.config
    assert net.attention.helper is net.all[1][0]
    assert net.attention.helper is not helper
    assert net.attention.split.__self__ is own
    assert net.attention.join.keywords["config"] is own
    net(torch.randn(2, 7, 8))
    assert copy.deepcopy(net)(X).shape == (3, 5, 3)


def test_undoing_puts_the_very_old_objects_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config, helper, net, teacher = pair()
    plan = sec.plan(sec.trace(net, X), sec.Ratio(0.5))
    before = reachable(net, teacher, config, helper)

    def refuse(*_: Any) -> None:
        raise sec.VerifyError("planted")

    monkeypatch.setattr(apply_module, "check", refuse)
    with pytest.raises(sec.VerifyError, match="planted"):
        sec.apply(net, plan)
    assert reachable(net, teacher, config, helper) == before
    assert net.config is config


def test_a_saved_model_is_loaded_into_one_of_a_shared_config(tmp_path: Any) -> None:
    _, _, net, _ = pair()
    sec.save(sec.apply(net, sec.plan(sec.trace(net, X), sec.Ratio(0.5))), tmp_path / "file")
    config, _, fresh, teacher = pair()
    before = teacher(X)
    sec.load(tmp_path / "file", fresh)
    assert torch.equal(fresh.eval()(X), net.eval()(X))
    assert config == Config()
    assert torch.equal(teacher(X), before)


@pytest.mark.parametrize("kind", [dict, FrozenDict, lambda **k: [k["width"]]], ids=["dict", "frozen", "list"])
def test_containers_of_every_kind(kind: Callable[..., Any]) -> None:
    class Net(nn.Module):
        def __init__(self, sizes: Any) -> None:
            super().__init__()
            self.sizes, self.a, self.b = sizes, nn.Linear(8, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            width = self.sizes[0] if isinstance(self.sizes, list) else self.sizes["width"]
            return self.b(self.a(x).view(*x.shape[:-1], width).relu())

    sizes = kind(width=16)
    net, other = Net(sizes), Net(sizes)
    sec.apply(net, sec.plan(sec.trace(net, X), sec.Ratio(0.5)))
    assert other.sizes is sizes
    assert other(X).shape == net(X).shape == (3, 5, 2)
    assert type(net.sizes) is type(sizes)


TINY: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=16)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TINY)
def test_transformers(name: str, tmp_path: Any) -> None:
    model = TINY[name]().eval()
    config = model.config
    said = copy.deepcopy(vars(config))
    teacher = type(model)(config).eval()
    example = {"input_ids": torch.randint(0, 32, (1, 8))}
    before = teacher(**example).logits
    sec.apply(model, sec.plan(sec.trace(model, example), sec.Ratio(0.5)))
    assert vars(config) == said
    assert torch.equal(teacher(**example).logits, before)
    assert model.config is not config
    assert model.config.hidden_size == 8
    assert all(m.config is model.config for m in model.modules() if "config" in vars(m))
    assert model.generate(example["input_ids"], max_new_tokens=3, do_sample=False).shape == (1, 11)
    sec.save(model, tmp_path / "file")
    fresh = sec.load(tmp_path / "file", type(model)(config).eval())
    assert torch.equal(fresh(**example).logits, model(**example).logits)
    assert vars(config) == said
