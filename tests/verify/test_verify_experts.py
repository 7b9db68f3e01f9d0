"""Experts run on a kernel that takes only some widths: a cut to another one is refused, with the remedy."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import secateur as sec
from secateur.errors import VerifyError

WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(vocab_size=99, num_key_value_heads=2, num_local_experts=4, **WIDTHS)).eval()


def test_a_width_that_experts_cannot_run_with_is_refused() -> None:
    model, example = mixtral(), {"input_ids": torch.randint(0, 99, (2, 8))}
    want = model(**example).logits
    plan = sec.plan(sec.trace(model, example), sec.Ratio(0.3))
    with pytest.raises(VerifyError, match="round_to=4"):
        sec.apply(model, plan)
    assert torch.equal(model(**example).logits, want)


def test_with_the_remedy_the_cut_model_runs() -> None:
    model, example = mixtral(), {"input_ids": torch.randint(0, 99, (2, 8))}
    sec.apply(model, sec.plan(sec.trace(model, example), sec.Ratio(0.3), round_to=4))
    assert torch.isfinite(model(**example).logits).all()
