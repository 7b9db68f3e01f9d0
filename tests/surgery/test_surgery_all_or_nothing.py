"""Failures planted at every step of a cut: the model, the optimizer and torch are exactly as they were."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import secateur as sec
from secateur.pipeline import apply as apply_module
from secateur.state.held import Walk
from secateur.state.transaction import Transaction
from secateur.surgery import cut as cut_module
from secateur.surgery import optimizer as optimizer_module
from secateur.verify import oracle, run
from surgery.surgery_state import everything


class Planted(BaseException):
    """Not an Exception, as an interrupt is not."""


class Mixed(nn.Module):
    """Convolution, norm, attention that will need another class, a tensor in a plain attribute, sizes in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.sizes = {"width": [8]}
        self.offset = torch.randn(8)
        self.fc = nn.Linear(8, 2)
        self.fc.weight.tag = "kept"
        self.register_forward_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        self.offset = self.offset * 1  # its own: what a model is only given is not cut
        x = x.reshape(x.shape[0], -1, self.sizes["width"][0]) + self.offset
        return self.fc(self.attention(x, x, x)[0].mean(1))


def trained() -> tuple[Mixed, torch.optim.Optimizer, sec.Plan]:
    torch.manual_seed(0)
    net = Mixed()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    return net, optimizer, planned()


@cache
def planned() -> sec.Plan:
    plan = sec.plan(sec.trace(Mixed(), torch.randn(2, 3, 4, 4)), sec.Ratio(0.5))
    assert plan.attributes
    assert plan.kept_in_attributes
    return plan


STEPS: dict[str, tuple[Any, str]] = {
    "check_fit": (cut_module, "check_fit"),
    "check_alone": (apply_module, "check_alone"),
    "new_contents": (cut_module, "new_contents"),
    "what is left of one tensor": (cut_module, "select"),
    "what is left of a gradient": (cut_module, "_left_of_gradient"),
    "other contents": (cut_module, "put_contents"),
    "snapshot": (Transaction, "__init__"),
    "swap": (cut_module, "_swap"),
    "tensors in attributes": (Walk, "replace"),
    "write": (cut_module, "write"),
    "read": (cut_module, "read"),
    "class of the attention": (cut_module, "_loosen"),
    "readable attributes": (cut_module, "refresh"),
    "optimizer, new state": (optimizer_module, "_cut"),
    "optimizer, in place": (cut_module, "following"),
    "expected": (apply_module, "expected"),
    "check": (apply_module, "check"),
    "comparison": (oracle, "distance"),
    "stand-ins": (run, "raised"),
    "remember": (apply_module, "remember"),
}


def failing(original: Callable[..., Any], at: int, *, after: bool) -> Callable[..., Any]:
    """The function, which on its `at`-th call fails, before or after it has done its work."""
    calls = iter(range(1, 10**6))

    def function(*args: Any, **kwargs: Any) -> Any:
        if next(calls) != at:
            return original(*args, **kwargs)
        if after:
            original(*args, **kwargs)
        raise Planted

    return function


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_any_step_changes_nothing(
    step: str, at: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer, plan = trained()
    net.train()
    before = everything(net, optimizer)
    home, name = STEPS[step]
    with monkeypatch.context() as patch:
        patch.setattr(home, name, failing(getattr(home, name), at, after=after))
        try:
            sec.apply(net, plan, optimizer=optimizer)
        except Planted:
            assert everything(net, optimizer) == before
            return
    assert at > 1, f"{step} is no step of a cut: the test plants nothing"


def test_the_same_cut_succeeds_when_nothing_fails() -> None:
    net, optimizer, plan = trained()
    before = everything(net, optimizer)
    sec.apply(net, plan, optimizer=optimizer)
    assert everything(net, optimizer) != before
    assert net.conv.out_channels == 4


def test_an_optimizer_that_cannot_follow_changes_nothing() -> None:
    net, optimizer, plan = trained()
    optimizer.state[net.conv.weight]["odd"] = torch.zeros(5, 7)
    before = everything(net, optimizer)
    with pytest.raises(sec.ApplyError, match=r"Adam keeps 'odd' of shape \(5, 7\)"):
        sec.apply(net, plan, optimizer=optimizer)
    assert everything(net, optimizer) == before


def test_what_is_no_plan_or_no_optimizer_is_refused() -> None:
    net, _, plan = trained()
    before = everything(net)
    with pytest.raises(sec.ApplyError, match="takes a Plan, not str"):
        sec.apply(net, "plan")  # type: ignore[arg-type]
    with pytest.raises(sec.ApplyError, match=r"optimizer is a torch\.optim\.Optimizer, or None, not"):
        sec.apply(net, plan, optimizer=[])  # type: ignore[arg-type]
    assert everything(net) == before


def test_a_plan_for_another_model_is_refused() -> None:
    _, _, plan = trained()
    other = nn.Sequential(nn.Linear(3, 3))
    before = everything(other)
    with pytest.raises(sec.PlanError, match="is it for another model"):
        sec.apply(other, plan)
    assert everything(other) == before
    again, _, _ = trained()
    sec.apply(again, plan)
    before = everything(again)
    with pytest.raises(sec.PlanError, match="trace and plan this model anew"):
        sec.apply(again, plan)
    assert everything(again) == before


def test_a_forward_that_fails_after_the_cut_changes_nothing() -> None:
    net, optimizer, plan = trained()

    class Moody(Mixed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.conv.weight.shape[0] != 8:
                raise RuntimeError("only at full width")
            return super().forward(x)

    net.__class__ = Moody
    before = everything(net, optimizer)
    with pytest.raises(sec.VerifyError, match="does not run: RuntimeError: only at full width"):
        sec.apply(net, plan, optimizer=optimizer)
    assert everything(net, optimizer) == before
