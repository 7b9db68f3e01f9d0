"""Experts run on a kernel that takes only some widths: a plan keeps to them, and verification refuses any other."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import secateur as sec
from represented import represented
from secateur.errors import VerifyError

WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(vocab_size=99, num_key_value_heads=2, num_local_experts=4, **WIDTHS)).eval()


@pytest.mark.parametrize(
    "target", represented((sec.Ratio(0.3), sec.Params(0.77), sec.Macs(0.61)), by=(sec.Params(0.77),)), ids=str
)
def test_plans_keep_to_widths_that_experts_run_with(target) -> None:
    model, example = mixtral(), {"input_ids": torch.randint(0, 99, (2, 8))}
    plan = sec.plan(sec.trace(model, example), target)
    sec.apply(model, plan)
    widths = {n for name, p in model.named_parameters() if "experts" in name for n in p.shape[-2:]}
    assert all(width % 4 == 0 for width in widths)
    assert widths != {64, 128, 256}
    assert torch.isfinite(model(**example).logits).all()


def test_half_precision_asks_for_twice_as_many() -> None:
    model, example = mixtral().bfloat16(), {"input_ids": torch.randint(0, 99, (2, 8))}
    sizes = {len(axis.keep) for axis in sec.plan(sec.trace(model, example), sec.Ratio(0.3)).axes if axis.size > 32}
    assert sizes
    assert all(size % 8 == 0 for size in sizes)


def kernel_runs_here() -> bool:
    """Some torches have the grouped product on GPUs alone; Transformers then computes it in another way."""
    try:
        torch._grouped_mm(torch.zeros(4, 16), torch.zeros(2, 16, 16), offs=torch.tensor([2, 4], dtype=torch.int32))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


@pytest.mark.skipif(not kernel_runs_here(), reason="this torch has no grouped product on CPUs, so any width runs")
def test_any_other_width_is_refused() -> None:
    model, example = mixtral(), {"input_ids": torch.randint(0, 99, (2, 8))}
    want = model(**example).logits
    graph = sec.trace(model, example)
    graph.equations.constraints = [one for one in graph.equations.constraints if "% 4" not in str(one)]
    plan = sec.plan(graph, sec.Ratio(0.3))
    with pytest.raises(VerifyError, match="multiples of 4"):
        sec.apply(model, plan)
    assert torch.equal(model(**example).logits, want)
