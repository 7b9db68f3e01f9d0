"""What the report says of held-back data: of the model's answer, not of caches and hidden states beside it."""

import copy
import math

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

import secateur as sec
from secateur.sparse.report import Agreement, Differences


def _whisper() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    layers = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers",)}
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    widths = {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
    places = {"max_source_positions": 10, "max_target_positions": 10, "num_mel_bins": 8}
    tokens = {"vocab_size": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(
        WhisperConfig(d_model=16, **layers, **heads, **widths, **places, **tokens)
    ).eval()


def test_logits_are_compared_and_not_caches() -> None:
    model, chance = _whisper(), torch.Generator().manual_seed(0)

    def batch() -> dict[str, torch.Tensor]:
        tokens = torch.randint(30, (2, 5), generator=chance)
        return {"input_features": torch.randn(2, 8, 20, generator=chance), "decoder_input_ids": tokens}

    dense, judge = copy.deepcopy(model), batch()
    report = sec.sparsify(model, [batch() for _ in range(2)], sec.NM(2, 4), held_back=[judge], method=sec.Magnitude())
    with torch.no_grad():
        wanted, found = dense(**judge).logits, model(**judge).logits
    assert report.held_back is not None
    assert report.held_back.error == pytest.approx(
        float((wanted - found).square().sum() / wanted.square().sum()), rel=1e-4
    )
    assert report.held_back.same == pytest.approx(float((wanted.argmax(-1) == found.argmax(-1)).float().mean()))


def test_the_same_largest_output_is_told_of_scores_only() -> None:
    seen = Differences()
    seen.add(torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4))  # a picture
    assert seen.agreement() == Agreement(0.0, None, None, 1)
    seen = Differences()
    seen.add({"logits": torch.eye(3)[None], "cache": torch.ones(5, 5)}, {"logits": torch.eye(3)[None].flip(1)})
    agreement = seen.agreement()
    assert agreement is not None
    assert agreement.same == pytest.approx(1 / 3)


def test_a_perplexity_that_no_number_holds() -> None:
    assert Agreement(1.0, None, (1.0, 5000.0), 1).perplexity == (pytest.approx(math.e), math.inf)
    assert math.isnan((Agreement(1.0, None, (1.0, math.nan), 1).perplexity or (0, 0))[1])
