"""How far apart two outputs are: each element by what can be expected of its own order of magnitude."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from secateur.surgery import cut as cut_module
from secateur.verify.oracle import distance

LOGITS = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def masked(value: float, part: float) -> Tensor:
    """Logits of which a part is a mask."""
    logits = LOGITS.clone()
    logits[: int(64 * part)] = value
    return logits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("part", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("value", [-1e9, -1e4 * 300, torch.finfo(torch.float32).min, 1e15, -float("inf")])
def test_a_mask_does_not_hide_an_error(value: float, part: float, dtype: torch.dtype) -> None:
    want = masked(value, part).to(dtype)
    got = want.clone()
    got[-1] += 1.0
    assert distance(want, got) > 0.1
    assert distance(want, want.clone()) == 0


def test_a_mask_that_is_added_is_rounded_and_hides_hardly_anything() -> None:
    want = LOGITS.clone()
    want[:32] -= 1e9
    got = want * (1 + 1e-15)
    assert distance(want, got) < 1e-12
    got[-1] += 0.1
    assert distance(want, got) > 1e-9


def test_the_masks_themselves_are_judged() -> None:
    want = masked(-1e9, 0.5)
    got = want.clone()
    got[0] = -1.001e9
    assert distance(want, got) == pytest.approx(1e-3, rel=0.1)
    got[0] = 0
    assert distance(want, got) > 0.9


def test_errors_in_zeros_and_missing_masks() -> None:
    want = torch.tensor([0.0, 0.0, -1e9], dtype=torch.float64)
    assert distance(want, torch.tensor([1e-3, 0.0, -1e9], dtype=torch.float64)) > 0.1
    assert distance(want, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)) > 0.9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_cancellation_leaves_is_no_error(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    want = torch.cat([LOGITS, torch.zeros(8)]).to(dtype)
    got = want * (1 + 2 * eps)
    got[-8:] = 4 * eps  # one minus one
    bound = 1e-9 if dtype is torch.float64 else 1e-3
    assert distance(want, got) < bound
    small = want.clone()
    small[-8:] = 1e-6
    assert distance(small, small + 4 * eps) < bound
    alike = (9 * (LOGITS - LOGITS.max())).exp().to(dtype)  # many orders of magnitude, but no gap
    assert distance(alike, alike + eps / 8) < bound


def test_outputs_of_any_unit() -> None:
    for unit in (1e-20, 1.0, 1e20):
        got = LOGITS.clone() * unit
        got[3] *= 1.01
        assert distance(LOGITS * unit, got) > 1e-4
        assert distance(LOGITS * unit, LOGITS * unit * (1 + 1e-15)) < 1e-12


def test_complex_numbers() -> None:
    want = torch.complex(LOGITS, LOGITS)
    assert distance(want, want + 0.1j) > 1e-2


class Head(nn.Module):
    """Logits with a mask, or boxes over a threshold."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        out = self.b(self.a(x).relu())
        if self.kind == "masked":
            return torch.cat([out, out.new_full((out.shape[0], 1), -1e9)], 1)
        boxes = out[out[:, 0] > 1e6]
        return boxes if self.kind == "nothing" else (boxes, out) if self.kind == "boxes" else out / 0 * 0


def plan_for(kind: str) -> tuple[Head, sec.Plan]:
    torch.manual_seed(0)
    net = Head(kind)
    return net, sec.plan(sec.trace(net, torch.randn(3, 4)), sec.Ratio(0.5))


def test_a_wrong_cut_behind_a_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, plan = plan_for("masked")
    original = cut_module._swap

    def wrong(model: nn.Module, *args: Any) -> None:
        original(model, *args)
        model.b.weight.data.mul_(1.01)

    with monkeypatch.context() as patch:
        patch.setattr(cut_module, "_swap", wrong)
        with pytest.raises(sec.VerifyError, match="differs by"):
            sec.apply(net, plan)
    sec.apply(net, plan)


@pytest.mark.parametrize("kind", ["nothing", "NaN"])
def test_a_comparison_of_nothing_proves_nothing(kind: str) -> None:
    net, plan = plan_for(kind)
    with pytest.raises(sec.VerifyError, match=r"nothing to compare.*an example on which"):
        sec.apply(net, plan)
    assert net.a.weight.shape == (8, 4)
    sec.apply(net, plan, verify=False)


def test_what_was_not_compared_is_said() -> None:
    net, plan = plan_for("boxes")
    with pytest.warns(sec.SecateurWarning, match="output 0 is empty, so there was nothing to compare there"):
        sec.apply(net, plan)
    assert net.a.weight.shape == (4, 4)
