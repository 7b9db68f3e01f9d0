"""Carry out a plan and prove it right, or leave the model as it was."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from secateur.compensate import Compensation, twin
from secateur.errors import ApplyError, VerifyError
from secateur.plan.plan import Plan
from secateur.surgery import Cut, check_fit
from secateur.trace import unwrap
from secateur.verify.oracle import check, expected

_PLAN = "_secateur_plan"

Model = TypeVar("Model", bound=nn.Module)


def apply(
    model: Model,
    plan: Plan,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    verify: bool = True,
    compensate: Compensation | None = None,
) -> Model:
    """Cut a model, in place, and verify it.

    >>> import secateur as sec
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> plan = sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Ratio(0.5))
    >>> sec.apply(net, plan)
    Sequential(
      (0): Linear(in_features=4, out_features=4, bias=True)
      (1): ReLU()
      (2): Linear(in_features=4, out_features=2, bias=True)
    )

    All or nothing: whatever goes wrong, the model and the optimizer are as they were, bit for bit. With `optimizer`,
    its state is cut along and training goes on. `verify=False` skips the proof, which runs the full-size and the cut
    model once each on the example, in double precision. `compensate`, such as `LeastSquares(batches)`, then lets what
    is left take over for what was removed.
    """
    inner = unwrap(model)
    if not isinstance(plan, Plan):
        raise ApplyError(f"apply takes a Plan, not {type(plan).__name__}; make one with secateur.plan")
    if compensate is not None and not isinstance(compensate, Compensation):
        raise ApplyError(f"compensate is LeastSquares(batches) or Constants(batches), not {compensate!r:.80}")
    check_fit(inner, plan)
    want = expected(inner, plan, plan.example) if verify and plan.axes else None
    whole = None if compensate is None else twin(inner, plan)
    cut = Cut(inner, plan, optimizer)
    try:
        if want is not None:
            check(inner, plan.example, want)
        remember(inner, plan)
        if compensate is not None and whole is not None:
            compensate(whole, inner, plan)
    except BaseException as error:
        cut.undo()
        if isinstance(error, VerifyError) and want is not None and not want.layers:
            _find_the_layer(inner, plan)
        raise
    return model


def _find_the_layer(model: nn.Module, plan: Plan) -> None:
    """Try a cut that went wrong once more with the oracle that compares layer by layer; it raises with the answer."""
    want = expected(model, plan, plan.example, absent=True)
    cut = Cut(model, plan)
    try:
        check(model, plan.example, want)
    finally:
        cut.undo()


def remember(model: nn.Module, plan: Plan) -> None:
    """Keep with the model the plan that leads to it from its full size, for `save`."""
    before = plan_of(model)
    model.__dict__[_PLAN] = plan if before is None else before.then(plan)


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that made a model what it is from its full size; None if it was never cut."""
    found = unwrap(model).__dict__.get(_PLAN)
    return found if isinstance(found, Plan) else None
