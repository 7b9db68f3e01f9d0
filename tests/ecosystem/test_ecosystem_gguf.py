"""llama.cpp opens the GGUF file of a cut model, and computes what the model does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import secateur as sec
from secateur.gguf import export

pytestmark = pytest.mark.ecosystem

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
TOKENS = [5, 17, 2, 80, 33, 9, 41, 64, 7, 28]
WORDS = {"input_ids": torch.tensor([TOKENS])}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
Plans = Callable[[sec.Graph], sec.Plan]


def loadable(graph: sec.Graph) -> sec.Plan:
    plan = sec.plan(graph, sec.Params(0.75), loadable=True)
    assert plan.fields
    return plan


def each_layer_its_own(graph: sec.Graph) -> sec.Plan:
    heads, units = "model.layers.{}.self_attn kv heads", "model.layers.{}.mlp*"
    ratios = {heads.format(0): 0.5, heads.format(2): 0.25, units.format(1): 0.5, units.format(2): 0.25}
    return sec.plan(graph, sec.Ratio(ratios))


def pairs_and_width(graph: sec.Graph) -> sec.Plan:
    """Fewer rotary pairs, so other frequencies, and a scale of attention that is no longer that of a head's width."""
    pairs = next(axis.name for axis in graph.axes if "rotary pairs" in axis.name)
    stream = max(graph.axes, key=lambda axis: len(axis.sites)).name
    return sec.plan(graph, sec.Ratio({pairs: 0.5, stream: 0.25}))


MODELS: dict[str, tuple[Callable[[], Any], Plans]] = {
    "loadable": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), loadable),
    "tied": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)), loadable),
    "other counts": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), each_layer_its_own),
    "rotary pairs": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), pairs_and_width),
    "scaled": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)), loadable),
    "mistral": (lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=None)), loadable),
    "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)), each_layer_its_own),
}


def _cut(name: str) -> Any:
    torch.manual_seed(0)
    build, plans = MODELS[name]
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # biases and norms, too; sharper outputs
    model.generation_config.eos_token_id = None
    return sec.apply(model, plans(sec.trace(model, WORDS, variants=False)))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    llama_cpp = pytest.importorskip("llama_cpp")
    made = []

    def opens(model: Any, **options: Any) -> Any:
        export(model, tmp_path / "small.gguf", **options)
        exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}  # by default keys are rounded
        options = {"n_ctx": 64, "n_threads": 1, "n_threads_batch": 1, "logits_all": True, "verbose": False, **exact}
        made.append(llama_cpp.Llama(str(tmp_path / "small.gguf"), **options))
        return made[-1]

    yield opens
    for each in made:
        each.close()


def _logits(llama: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    llama.reset()
    llama.eval(tokens)
    return np.array(llama.scores[: len(tokens)])


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits_and_the_same_words(name: str, opened: Callable[..., Any]) -> None:
    model = _cut(name)
    with torch.no_grad():
        want = model(**WORDS).logits[0].numpy()
        words = model.generate(**WORDS, max_new_tokens=12, do_sample=False)[0, len(TOKENS) :].tolist()
    llama = opened(model)
    got = _logits(llama, TOKENS)
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
    llama.reset()
    chosen = llama.generate(TOKENS, temp=0.0, top_k=1, repeat_penalty=1.0)
    assert [next(chosen) for _ in range(12)] == words


def test_smaller_numbers(opened: Callable[..., Any]) -> None:
    model = _cut("loadable")
    with torch.no_grad():
        want = model(**WORDS).logits[0].numpy()
    half = _logits(opened(model, dtype="f16"), TOKENS)
    assert 1e-6 < np.abs(half - want).max() / np.abs(want).max() < 1e-2


def test_the_vocabulary_of_another_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    whole = gguf.GGUFWriter(tmp_path / "whole.gguf", "llama")
    whole.add_tokenizer_model("llama")
    whole.add_token_list([f"word{i}" for i in range(96)])
    whole.add_token_scores([0.5 * i for i in range(96)])
    whole.add_eos_token_id(7)
    whole.write_header_to_file()
    whole.write_kv_data_to_file()
    whole.write_tensors_to_file()
    whole.close()
    export(_cut("loadable"), tmp_path / "small.gguf", tokenizer=tmp_path / "whole.gguf")
    fields = gguf.GGUFReader(tmp_path / "small.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents()[95] == "word95"
    assert fields["tokenizer.ggml.scores"].contents()[3] == 1.5
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 7
    sizes = {**SIZES, "vocab_size": 64}
    with pytest.raises(sec.FileError, match="has 96 tokens, the model 64"):
        export(LlamaForCausalLM(LlamaConfig(**sizes)), tmp_path / "x", tokenizer=tmp_path / "whole.gguf")
    assert not (tmp_path / "x").exists()


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(sec.FileError, match="not of a GPT2LMHeadModel"):
        export(GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)), path)
    with pytest.raises(sec.FileError, match="SiLU"):
        export(LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")), path)
    with pytest.raises(sec.FileError, match="last 8 tokens"):
        export(MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=8)), path)
    with pytest.raises(sec.FileError, match="none of f32"):
        export(LlamaForCausalLM(LlamaConfig(**SIZES)), path, dtype="q2")
    changed = LlamaForCausalLM(LlamaConfig(**SIZES))
    changed.model.layers[1].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(sec.FileError, match="act_fn"):
        export(changed, path)
    assert not path.exists()
