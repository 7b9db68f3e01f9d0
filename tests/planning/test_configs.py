"""What following a constructor tells is remembered by value: for equal configurations, a few of them, and no model."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import transformers

import secateur as sec
from secateur.planning import configs

TOKENS = {"input_ids": torch.arange(3, 11)[None]}


def llama(**sizes: int) -> transformers.LlamaModel:
    given = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 24, **sizes}
    return transformers.LlamaModel(transformers.LlamaConfig(vocab_size=40, num_hidden_layers=1, **given)).eval()


def planned(model: transformers.LlamaModel) -> dict[str, int]:
    plan = sec.plan(sec.trace(model, TOKENS, variants=False), sec.Ratio({"*mlp*": 0.5}))
    return {str(place): new for place, _, new in plan.attributes if place.path[-1] == "intermediate_size"}


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes whose constructors were followed, and nothing remembered at first."""
    seen: list[str] = []
    follow = configs.constructed
    monkeypatch.setattr(configs, "_remembered", {})
    monkeypatch.setattr(
        configs, "constructed", lambda maker, model: (seen.append(type(model).__name__), follow(maker, model))[1]
    )
    return seen


def test_once_for_equal_configurations_and_again_for_others(followed: list[str]) -> None:
    model = llama()
    first = planned(model)
    assert set(first.values()) == {12}
    assert planned(copy.deepcopy(model)) == first
    assert len(followed) == 1
    assert set(planned(llama(intermediate_size=40)).values()) == {20}
    assert len(followed) == 2
    model.config.initializer_range = 0.5
    assert planned(model) == first
    assert len(followed) == 3


def test_not_for_classes_of_the_users_own(followed: list[str]) -> None:
    class Own(transformers.LlamaModel):
        pass

    model = Own(llama().config).eval()
    assert planned(model) == planned(model)
    assert followed == ["Own", "Own"]


def test_few_are_remembered_and_no_model_is_kept(followed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "_MOST_REMEMBERED", 1)
    model = llama()
    planned(model)
    planned(llama(intermediate_size=40))
    planned(model)
    assert len(followed) == 3
    assert len(configs._remembered) == 1
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None
