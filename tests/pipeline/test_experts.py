"""Fewer experts: what is left puts out what the uncut model does when the others are never chosen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

import secateur as sec
from represented import represented

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"vocab_size": 31, "num_hidden_layers": 2}
WORDS = {"input_ids": torch.arange(24).reshape(2, 12) % 31}


def mixtral():
    return MixtralForCausalLM(MixtralConfig(num_local_experts=6, num_experts_per_tok=2, **SMALL))


def qwen():
    more = {"num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 8}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(moe_intermediate_size=8, **more, **SMALL))


def deepseek():
    more = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    more |= {"moe_intermediate_size": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**more, qk_nope_head_dim=4, v_head_dim=8, **SMALL))


FIELDS = {"mixtral": "num_local_experts", "qwen": "num_experts", "deepseek": "n_routed_experts"}
MODELS = {"mixtral": mixtral, "qwen": qwen, "deepseek": deepseek}


def made(build, seed=0):
    torch.manual_seed(seed)
    model = build().eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def logits(model, words=WORDS):
    with torch.no_grad():
        return model(**words).logits


def never_chosen(model, kept):
    """What a model puts out when the routers, by name, score all experts but some at minus infinity."""
    linear = torch.nn.functional.linear
    gone = {}
    for name, stay in kept.items():
        weight = model.get_parameter(name)
        gone[id(weight)] = [i for i in range(len(weight)) if i not in stay]

    def scored(x, weight, bias=None):
        out = linear(x, weight, bias)
        if id(weight) in gone:
            out[..., gone[id(weight)]] = float("-inf")
        return out

    torch.nn.functional.linear = scored
    try:
        return logits(model)
    finally:
        torch.nn.functional.linear = linear


@pytest.mark.parametrize("which", represented(MODELS, by=("qwen",)))
def test_experts_that_are_gone_are_those_that_are_never_chosen(which, tmp_path) -> None:
    build, field = MODELS[which], FIELDS[which]
    model = made(build)
    plan = sec.plan_experts(sec.trace(model, WORDS, variants=False), 4, [WORDS], loadable=True)
    assert dict(plan.fields) == {field: 4}
    assert sec.Plan.from_json(plan.to_json()) == plan
    want = never_chosen(model, {name: plan.kept[name][0] for name in plan.routers})
    assert not torch.allclose(want, logits(model), atol=1e-3)
    sec.apply(model, plan)
    assert torch.allclose(logits(model), want, atol=1e-5)
    assert plan.macs.after == sec.macs(model, WORDS) < plan.macs.before
    assert plan.params.after == sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path / "folder")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "folder").eval()), logits(model))
    sec.save(model, tmp_path / "small.safetensors")
    assert torch.equal(logits(sec.load(tmp_path / "small.safetensors", made(build, 1))), logits(model))


class Mixture(nn.Module):
    """Experts of one's own, of which only two are ever asked."""

    def __init__(self):
        super().__init__()
        self.n_experts = 5
        self.gate, self.up = nn.Linear(4, 5), nn.Parameter(torch.randn(5, 3, 4))
        self.gate.bias.data = torch.tensor([0.0, 30.0, 0.0, 30.0, 0.0])
        self.down = nn.Parameter(torch.randn(5, 4, 3))
        self.plain = nn.Linear(4, 5)  # as wide as there are experts

    def forward(self, x):
        scores, which = self.gate(x).softmax(-1).topk(2)
        hit = nn.functional.one_hot(which, self.n_experts).to(x.dtype)
        mixed = torch.einsum("tk,tke,ehi,ti->teh", scores, hit, self.up, x).relu()
        return self.plain(torch.einsum("teh,eoh->to", mixed, self.down))


def test_those_stay_that_most_tokens_go_to() -> None:
    torch.manual_seed(0)
    net, x = Mixture(), torch.randn(32, 4)
    before = net(x).detach()
    plan = sec.plan_experts(sec.trace(net, x), 2, [x])
    assert plan.kept["gate.weight"][0] == (1, 3)
    assert sorted(plan.kept) == ["down", "gate.bias", "gate.weight", "up"]
    sec.apply(net, plan)
    assert net.n_experts == 2
    assert torch.allclose(net(x), before, atol=1e-5)


def test_what_cannot_be_is_refused_and_nothing_has_changed() -> None:
    torch.manual_seed(0)
    net, x = Mixture(), torch.randn(8, 4)
    graph, want = sec.trace(net, x), net(x)
    for keep in (1, 6, 2.0, True):
        with pytest.raises(sec.PlanError, match="can be kept"):
            sec.plan_experts(graph, keep, [x])
    with pytest.raises(sec.ApplyError, match="token by token"):
        sec.apply(net, sec.plan_experts(graph, 3, [x]), compensate=sec.LeastSquares([x]))
    plain = sec.trace(LlamaForCausalLM(LlamaConfig(**SMALL)), WORDS, variants=False)
    with pytest.raises(sec.PlanError, match="no experts were found"):
        sec.plan_experts(plain, 2, [WORDS])
    assert torch.equal(net(x), want)
