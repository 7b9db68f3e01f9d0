"""Random tests: the same cases every time, and what a search finds is kept."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

import kept


def test_what_fails_is_kept_in_its_smallest_form_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def test_small(number: int, pair: list[int]) -> None:
        tried.append(number)
        assert number < 300

    arguments = {"number": st.integers(0, 10_000), "pair": st.lists(st.integers())}
    monkeypatch.setattr(kept, "COUNT", 200)
    with pytest.raises(AssertionError):
        kept.drawn(1, tmp_path, **arguments)(test_small)()
    (path,) = tmp_path.iterdir()
    assert path.name == "test_small-1.json"
    assert json.loads(path.read_text())["arguments"] == {"number": 300, "pair": []}

    monkeypatch.setattr(kept, "COUNT", 0)
    tried.clear()
    with pytest.raises(AssertionError):
        kept.drawn(1, tmp_path, **arguments)(test_small)()
    assert tried[0] == 300
    assert len(list(tmp_path.iterdir())) == 1


def test_every_kept_case_is_one_of_a_test() -> None:
    here = Path(__file__).parents[1]
    text = "".join(path.read_text() for room in ("fuzz", "axes") for path in (here / room).glob("test_*.py"))
    for path in kept.CASES.glob("*.json"):
        assert f"def {path.stem.rpartition('-')[0]}(" in text, path


def test_random_numbers_are_the_same_for_each_test() -> None:
    assert settings().derandomize
    assert torch.initial_seed() == 0
    drawn = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())
