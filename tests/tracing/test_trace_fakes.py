"""Fake tensors that are made the short way are those that torch makes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import secateur as sec
from secateur.compat import FakeTensor, FakeTensorMode
from secateur.tracing import fakes

CPU = torch.device("cpu")


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


@pytest.mark.parametrize("device", [CPU, torch.device("cuda", 1), torch.device("meta")])
def test_they_have_the_same_attributes(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(fakes, "_alike", {})
    mode = FakeTensorMode()
    try:
        torchs: Any = FakeTensor(mode, meta(2, 3), device)
    except Exception:
        pytest.skip("this torch has no such device")
    for _ in range(2):
        ours = fakes.fake_of(mode, meta(2, 3), device)
        assert vars(ours) == vars(torchs)
        assert (ours.shape, ours.device, ours.fake_mode) == (torchs.shape, torchs.device, mode)


def test_what_differs_from_one_to_the_next_is_torchs_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "_alike", {})
    monkeypatch.setattr(fakes, "as_subclass", None)
    mode = FakeTensorMode()
    assert [fakes.fake_of(mode, meta(n), CPU).shape for n in (1, 2)] == [(1,), (2,)]
    assert fakes._alike == {CPU: None}


def test_no_mode_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "_alike", {})
    mode = FakeTensorMode()
    fakes.fake_of(mode, meta(2), CPU)
    assert mode not in fakes._alike[CPU].values()  # type: ignore[union-attr]


@pytest.mark.parametrize("at_work", [True, False])
def test_the_collector_of_cycles_is_as_it_was(at_work: bool) -> None:
    (gc.enable if at_work else gc.disable)()
    try:
        sec.trace(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.zeros(1, 3))
        assert gc.isenabled() == at_work
        with pytest.raises(sec.TraceError):
            sec.trace(nn.Linear(3, 4), torch.zeros(1, 2))
        assert gc.isenabled() == at_work
    finally:
        gc.enable()


def test_runs_on_real_tensors_do_not_wait_for_the_end() -> None:
    seen: list[bool] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> Any:
            seen.append(gc.isenabled())
            return self.b(self.a(x) if x.sum().item() >= 0 else -self.a(x))

    sec.trace(Net(), torch.zeros(1, 3), variants=False)
    assert seen == [False, True]
