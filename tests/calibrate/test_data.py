"""The user's data: read once, put aside as they were, no more than was asked for."""

from __future__ import annotations

import itertools
import tempfile
import time

import pytest
import torch

import secateur as sec
from secateur.calibrate import data
from secateur.calibrate.data import taken


@pytest.mark.parametrize("room", [2**20, 0], ids=["in-memory", "in-files"])
def test_batches_come_back_as_they_were(room: int, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(data, "_ROOM", room)
    shared = torch.randn(3, 4)
    given = [
        {"ids": torch.arange(6).view(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool), "name": "one", "none": None},
        (shared, [shared, shared.t()], torch.tensor(2.5, dtype=torch.float16), torch.zeros(0, 3)),
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        torch.randn(5, dtype=torch.bfloat16)[::2],
        torch.eye(3).to_sparse(),
    ]
    with taken(iter(given), "reading") as found:
        assert len(found) == 5
        for _ in range(2):
            for batch, want in zip(found, given, strict=True):
                _same(batch, want)
                if isinstance(batch, dict):
                    batch["ids"].zero_()  # a copy
        assert bool(list(tmp_path.iterdir())) == (room == 0)
    assert not list(tmp_path.iterdir())


def _same(one, other) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            _same(one[key], other[key])
    elif isinstance(one, tuple | list):
        for a, b in zip(one, other, strict=True):
            _same(a, b)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        assert torch.equal(one.to_dense(), other.to_dense())
    else:
        assert one == other


def test_limits_end_an_endless_iterable() -> None:
    def endless():
        return ({"ids": torch.zeros(4, 16, dtype=torch.long)} for _ in itertools.count())

    assert len(list(sec.Data(endless(), samples=9))) == 3
    assert len(list(sec.Data(endless, tokens=128))) == 2
    start = time.monotonic()
    assert len(list(sec.Data(endless(), minutes=1e-3))) > 1
    assert time.monotonic() - start < 5
    assert len(list(sec.Data([torch.zeros(2)] * 3))) == 3


def test_how_much_of_a_limit_was_taken() -> None:
    taking = iter(sec.Data((torch.zeros(4, 8) for _ in itertools.count()), samples=16, tokens=64))
    assert [(len(batch), taking.share) for batch in taking] == [(4, 0.5), (4, 1.0)]  # of the tokens
    assert iter(sec.Data([torch.zeros(4)])).share is None


@pytest.mark.parametrize("limit", [{"samples": 0}, {"tokens": -1}, {"minutes": True}, {"samples": "many"}], ids=str)
def test_limits_that_are_none_are_refused(limit) -> None:
    with pytest.raises(sec.CalibrationError, match="is a positive number"):
        sec.Data([], **limit)


@pytest.mark.parametrize(("given", "said"), [(3, "iterable of batches"), ([], "no batches"), ("abc", "iterable")])
def test_what_holds_no_batches_is_refused(given, said: str) -> None:
    with pytest.raises(sec.CalibrationError, match=said), taken(sec.Data(given), "reading"):
        pass
