"""The harness notices: cuts that are wrong on purpose, each in one of the ways that it looks for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from beyond.harness import Case, FaultError, Result, SameNoise, World, agree, floats, judge

CONFIG = {"scale": 2}


class Plain(nn.Module):
    """Nothing about it is special."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.kept = nn.Linear(4, 8), nn.Linear(8, 3), True
        self.config: dict[str, int] = CONFIG

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is False and (len(x) == 5 or self.training):
            raise RuntimeError("on another input")
        return self.b(torch.relu(self.a(x))) * self.config["scale"]


class Slips(Plain):
    """A copy of it is not the same."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Slips:
        made = Slips()
        made.a, made.b = copy.deepcopy(self.a, memo), copy.deepcopy(self.b, memo)
        if made.a.out_features < 8:
            nn.init.zeros_(made.b.bias)
        return made


def shifted(model: Plain) -> None:
    with torch.no_grad():
        model.b.bias[0] += 1e-4


def stale(model: Plain) -> None:
    model.kept = False


def rewritten(model: Plain) -> None:
    model.config["scale"] = 3


def nothing(model: Plain) -> None:
    pass


def outcome(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], None], kind: type[nn.Module] = Plain) -> Result:
    CONFIG["scale"] = 2
    real = sec.apply
    monkeypatch.setattr(sec, "apply", lambda model, plan: (real(model, plan), spoil(model)))
    return judge(Case("spoiled", lambda: World(kind(), lambda: CONFIG), lambda: [floats(3, 4), floats(5, 4)]))


@pytest.mark.parametrize(
    ("spoil", "kind", "verdict", "why"),
    [
        (nothing, Plain, "right", ""),
        (shifted, Plain, "wrong", "exact: beside zeros: input 0 is off by 2.0e-04"),
        (stale, Plain, "crashes later", "exact: another input: RuntimeError: on another input"),
        (rewritten, Plain, "wrong", "exact: something outside of the model changed"),
        (nothing, Slips, "refused", "a deep copy of the cut model does not put out what the model does"),
    ],
)
def test_it_notices(monkeypatch: Any, spoil: Any, kind: Any, verdict: str, why: str) -> None:
    result = outcome(monkeypatch, spoil, kind)
    assert result.verdict == verdict
    assert why in result.why


def test_a_raw_error_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sec, "plan", lambda *_, **__: {}["nothing"])
    result = judge(Case("raw", Plain, lambda: [floats(3, 4)]))
    assert result.verdict == "crashes later"
    assert "KeyError" in result.why


def test_nothing_cut_is_a_refusal() -> None:
    result = judge(Case("one layer", lambda: nn.Linear(4, 3), lambda: [floats(3, 4)]))
    assert result.verdict == "refused"
    assert "a dimension of the model's output" in result.why


def test_a_huge_element_hides_no_other() -> None:
    want = torch.tensor([-1e9, 1.0])
    agree([[want.clone()]], [[want]], "same", 1e-8)
    with pytest.raises(FaultError, match=r"off by 1.0e-03"):
        agree([[want + torch.tensor([0.0, 1e-3])]], [[want]], "off", 1e-8)


def test_noise_of_two_widths_is_alike() -> None:
    with SameNoise():
        assert torch.equal(torch.randn(3), torch.rand(5)[:3])
        assert bool((nn.functional.dropout(torch.ones(4), 0.5) == 2).all())
