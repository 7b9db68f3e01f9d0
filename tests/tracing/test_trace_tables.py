"""Tables in buffers that an example uses in part stay whole: a longer input needs the rest."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertModel

import secateur as sec


def test_a_model_that_was_cut_on_a_short_text_still_takes_a_long_one() -> None:
    widths = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = BertModel(BertConfig(vocab_size=99, max_position_embeddings=64, **widths)).eval()
    graph = sec.trace(model, {"input_ids": torch.randint(0, 99, (2, 8))})
    sec.apply(model, sec.plan(graph, sec.Ratio(0.5)))
    assert model.embeddings.position_ids.shape == (1, 64)
    assert model(input_ids=torch.randint(0, 99, (2, 60))).last_hidden_state.shape == (2, 60, 32)
    assert any(blocked.tensor == "embeddings.position_ids" for blocked in graph.blocked)


def test_a_weight_that_is_a_buffer_can_be_cut() -> None:
    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.randn(8, 4))
            self.register_buffer("second", torch.randn(3, 8))
            self.last = torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.last((x @ self.first.t()).relu() @ self.second.t())

    graph = sec.trace(Fixed(), torch.zeros(1, 4))
    assert "first[0]" in {str(site) for axis in graph.axes for site in axis.sites}
