"""Configuration fields tell the truth after a cut: a model built from them has the shapes of the cut one."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import secateur as sec
from oracle import each_axis

SMALL = {"vocab_size": 256, "num_hidden_layers": 2}


def test_llama_can_be_built_from_its_new_config() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(**SMALL, **sizes, head_dim=16)
    model = LlamaForCausalLM(config).eval()
    example = {"input_ids": torch.randint(0, 256, (1, 8))}
    graph = sec.trace(model, example)
    sec.apply(model, sec.plan(graph, each_axis(graph, 0.5)))
    assert (config.hidden_size, config.intermediate_size) == (64, 128)  # the user's own
    config = model.config
    assert (config.hidden_size, config.intermediate_size) == (32, 64)
    assert (config.num_key_value_heads, config.head_dim) == (2, 8)
    assert model.model.config is config
    fresh = LlamaForCausalLM(config).eval()
    fresh.load_state_dict(model.state_dict())
    assert {n: p.shape for n, p in fresh.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_a_field_that_describes_layers_of_different_sizes_stays() -> None:
    model = BertModel(BertConfig(**SMALL, hidden_size=32, intermediate_size=64, num_attention_heads=4)).eval()
    graph = sec.trace(model, {"input_ids": torch.randint(0, 256, (1, 8))})
    sec.apply(model, sec.plan(graph, {"encoder.layer.0.intermediate*": 0.5}))
    assert model.encoder.layer[0].intermediate.dense.out_features == 32
    assert model.config.intermediate_size == 64
    sec.apply(model, sec.plan(sec.trace(model, graph.example), sec.Ratio({"encoder.layer.1.intermediate*": 0.5})))
    assert model.encoder.layer[1].intermediate.dense.out_features == 32


def test_a_failed_cut_leaves_the_config_alone() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL, hidden_size=64, num_attention_heads=4, intermediate_size=96))
    example = {"input_ids": torch.randint(0, 256, (1, 8))}
    graph = sec.trace(model.eval(), example)
    plan = sec.plan(graph, each_axis(graph, 0.5))
    before = dict(vars(model.config))
    broken = sec.Plan(**{**vars(plan), "attributes": ()})
    try:
        sec.apply(model, broken)
    except sec.SecateurError:
        assert vars(model.config) == before
    else:
        raise AssertionError("a plan without its attributes went through")
