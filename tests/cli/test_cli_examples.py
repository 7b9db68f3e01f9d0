"""`--example`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur.cli.examples import parse
from secateur.cli.exits import UsageError


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from(["int64", "int32", "uint8"]))
def test_shape_dtype_and_range(shape: list[int], dtype: str) -> None:
    text = "x".join(map(str, shape))
    assert parse([text]).shape == torch.Size(shape)
    drawn = parse([f"{text}:{dtype}:7"])
    assert drawn.dtype == getattr(torch, dtype)
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < 7


def test_several_inputs() -> None:
    first, second = parse(["2x3", "4:int64"])
    assert (first.shape, second.shape) == ((2, 3), (4,))
    named = parse(["a=2x3", "b=4:float64"])
    assert {name: (tuple(t.shape), t.dtype) for name, t in named.items()} == {
        "a": ((2, 3), torch.float32),
        "b": ((4,), torch.float64),
    }


def test_the_same_each_time() -> None:
    assert torch.equal(parse(["2x3"]), parse(["2x3"]))


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["1,3,224"], "give a shape such as 1x3x224x224"),
        (["1x3:flot32"], "there is no dtype flot32; did you mean float32"),
        (["1x0"], "start at 1"),
        (["1x3:int64:0"], "start at 1"),
        (["a=1", "a=1"], "name every input, each once"),
        (["a=1", "1"], "name every input"),
        (["9" * 18], "--example 9999"),
        (["4:int64:99999999999999999999"], "int64 counts to"),
        (["4:uint8:300"], "uint8 counts to 255"),
    ],
    ids=["commas", "dtype", "zero", "below", "twice", "half-named", "huge", "int64", "uint8"],
)
def test_refused(texts: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(texts)
    assert words in str(caught.value)
