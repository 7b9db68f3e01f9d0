"""Carry out a plan and prove it right, or leave the model as it was."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from secateur.arguments import FLAG, an_instance, optional, shown
from secateur.arguments import check as check_arguments
from secateur.compensate import Compensation, Outcome, twin
from secateur.compensate import carry_out as refitted
from secateur.distributed import agreed, meet, ranks, together
from secateur.errors import ApplyError, VerifyError
from secateur.pipeline.save_pretrained import watch
from secateur.pipeline.sharded import cut_shapes, sharded_anew, unwrapped
from secateur.planning.plans import Plan
from secateur.state.held import named_tensors
from secateur.state.transaction import Transaction, transaction, untouched
from secateur.surgery import carry_out, check_fit
from secateur.surgery.blocks import shortened
from secateur.surgery.holders import check_alone, tell_holders, wrappers_follow
from secateur.tracing import unwrap
from secateur.tracing.examples import placed_with
from secateur.verify.blocks import expected_without
from secateur.verify.copies import copies_alike
from secateur.verify.numbers import numbers_of, way_of
from secateur.verify.oracle import Expected, check, expected

OPTIMIZER = optional(an_instance(torch.optim.Optimizer, "a torch.optim.Optimizer"))
_ROUTED = "compensate= compares token by token, and without some experts tokens go elsewhere; it goes with widths only"
_FACTORED = (
    "the plan cuts the rank of {}, in a basis that data told and a plan does not hold; load the file that the model "
    "was saved to, or call secateur.factor(model, names, batches) and plan anew"
)
_PLAN, _OUTCOME = "_secateur_plan", "_secateur_outcome"


class Proof(NamedTuple):
    """What a cut model must put out on an example."""

    example: Any
    want: Expected


Model = TypeVar("Model", bound=nn.Module)


def apply(
    model: Model,
    plan: Plan,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    verify: bool = True,
    compensate: Compensation | None = None,
    shard: Callable[[Any], object] | None = None,
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

    All or nothing: whatever goes wrong, the model and the optimizer are as they were, bit for bit. Parameters stay the
    same objects, so an optimizer made before still trains them; with `optimizer`, its state is cut along, too. One that
    was not passed refuses to go on with state of the old shapes. `verify=False` skips the proof, which runs the
    full-size and the cut model on the example and on one of other sizes, in double precision, and a deep copy of the
    cut model. `compensate`, such as `LeastSquares(batches)`, then refits the remaining weights; `sec.outcome(model)`
    says what came of it.

    In a process group every rank calls this, with the same plan; what fails on one rank is raised on all. A model that
    is spread over ranks is cut with `shard`, the function that sharded it, which is called once more: its parameters
    are new objects then, which `optimizer` is given. It is verified before it is sharded again. To be refitted
    or to lose blocks, it is put together on every rank.
    """
    with together("apply"):
        inner = unwrapped(model, shard)
        _check_arguments(plan, compensate)
        check_arguments("apply", ApplyError, locals(), optimizer=OPTIMIZER, verify=FLAG)
        check_fit(inner, plan)
        check_alone(inner, plan)
        agree_on("apply", plan)
        if shard is None:
            _apply(inner, plan, optimizer, verify, compensate)
            return model
        values = compensate is not None or bool(plan.removed)
        with sharded_anew(inner, shard, plan, optimizer, values=values) as old:
            if values:
                _apply(inner, plan, None, verify, compensate)
            else:
                cut_shapes(inner, plan, old, verify)
                remember(inner, plan)
                inner.__dict__.pop(_OUTCOME, None)
    return model


def _check_arguments(plan: object, compensate: object) -> None:
    if not isinstance(plan, Plan):
        raise ApplyError(f"apply takes a Plan, not {type(plan).__name__}; make one with secateur.plan")
    if compensate is not None and not isinstance(compensate, Compensation):
        raise ApplyError(f"compensate is LeastSquares(batches) or Constants(batches), not {shown(compensate)}")
    if compensate is not None and plan.routers:
        raise ApplyError(_ROUTED)
    if plan.factored:
        raise ApplyError(_FACTORED.format(plan.factored[0]))


def agree_on(what: str, plan: Plan) -> None:
    """Refuse, on every rank, a plan that is not the same on all."""
    if ranks() > 1:
        agreed(what, replace(plan, example=None, others=(), why="").to_json())


def _apply(
    inner: nn.Module,
    plan: Plan,
    optimizer: torch.optim.Optimizer | None,
    verify: bool,
    compensate: Compensation | None,
) -> None:
    whole = None if compensate is None else twin(inner, plan)
    with transaction(inner, optimizer) if plan.removed else nullcontext():
        narrower = plan if not plan.removed else _shortened(inner, plan, optimizer, verify)
        _narrowed(inner, narrower, plan, optimizer, verify, compensate, whole)


def _shortened(inner: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None, verify: bool) -> Plan:
    """Remove blocks, and compare with the model in which these hand on their input; what is left of the plan."""
    proof: list[Proof] = []
    for example in (placed_with(inner, each) for each in (plan.example, *plan.others) if verify):
        with suppress(VerifyError) if proof else nullcontext():  # that on other examples is as much as can be had
            proof.append(Proof(example, expected_without(inner, plan.removed.blocks, example)))
    left = shortened(inner, plan, optimizer)
    for example, want in proof:
        check(inner, example, want)
    check_fit(inner, left)
    check_alone(inner, left)
    return left


def _narrowed(
    inner: nn.Module,
    plan: Plan,
    whole_plan: Plan,
    optimizer: torch.optim.Optimizer | None,
    verify: bool,
    compensate: Compensation | None,
    whole: nn.Module | None,
) -> None:
    proof = _proof(inner, plan) if verify and plan.axes else []

    def finish(undo: Transaction) -> None:
        remember(inner, whole_plan)
        inner.__dict__.pop(_OUTCOME, None)
        if compensate is not None and whole is not None:
            origin = dict(named_tensors(whole))
            for name, tensor in named_tensors(inner):
                if name not in plan.kept:  # it is refitted as it is
                    undo.keep(tensor, again=origin[name].detach)
            inner.__dict__[_OUTCOME] = refitted(compensate, whole, inner, plan)
        meet("apply: done")  # on every rank, or on none

    proved(inner, plan, proof, finish, optimizer)


def _proof(model: nn.Module, plan: Plan) -> list[Proof]:
    """What the cut model must put out on the example, and on others that the full-size model takes."""
    first, *others = (placed_with(model, example) for example in (plan.example, *plan.others))
    proof = [Proof(first, expected(model, plan, first))]
    for example in others:
        with suppress(VerifyError):  # fake tensors have no values that could be out of range
            proof.append(Proof(example, expected(model, plan, example)))
    return proof


def proved(
    model: nn.Module,
    plan: Plan,
    proof: Sequence[Proof],
    finish: Callable[[Transaction], object],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Cut a model, compare it with what it should put out, and do what is left to do: all or nothing."""

    def cut(proof: Sequence[Proof], *, copied: bool = True) -> None:
        with transaction(model, optimizer) as undo:
            carry_out(model, plan, optimizer)
            for example, want in proof:
                check(model, example, want)
            if proof and copied and not copies_alike(model, proof[0].example):
                raise _CopyError
            finish(undo)

    with wrappers_follow(model):
        try:
            try:
                cut(proof)
            except VerifyError as error:
                cut(_second_thoughts(model, plan, proof, error))
        except _CopyError:
            if copies_alike(model, proof[0].example):
                raise VerifyError(
                    "a deep copy of the cut model does not put out what the model does: some of it is made anew "
                    "from numbers that the cut did not change. The model is as it was."
                ) from None
            cut(proof, copied=False)
    tell_holders(model, plan)


class _CopyError(Exception):
    """A copy of the cut model computes something else."""


def _second_thoughts(model: nn.Module, plan: Plan, proof: Sequence[Proof], error: VerifyError) -> list[Proof]:
    """A proof with numbers that follow the cut, where it is not exact; otherwise raises with the line or the layer at
    fault."""
    for example, want in proof:
        _find_the_line(model, plan, example, want.dtype)
    if all(axis.exact for axis in plan.axes):
        for example, _ in proof:
            _find_the_layer(model, plan, example)
        raise error
    try:
        with untouched(model):
            carry_out(model, plan)
            numbers = [numbers_of(model, example, want.dtype) for example, want in proof]
        wants = (expected(model, plan, p.example, numbers=n) for p, n in zip(proof, numbers, strict=True))
        return [Proof(p.example, want) for p, want in zip(proof, wants, strict=True)]
    except Exception:  # it is not a matter of numbers
        raise error from None


def _find_the_line(model: nn.Module, plan: Plan, example: Any, dtype: torch.dtype) -> None:
    """Raise if the cut model takes another way than the full-size one, with the line where it does."""
    try:
        before = way_of(model, example, dtype)
        with untouched(model):
            carry_out(model, plan)
            turn = way_of(model, example, dtype, before.calls).path
    except Exception:  # it does not run at all, which is said elsewhere
        return
    if turn is not None and turn.where:
        raise VerifyError(
            f"the cut model takes another way than the full-size one at {turn.where}: something there depends on the "
            "size of what was cut. Leave that as it is (protect=). The model is as it was."
        )


def _find_the_layer(model: nn.Module, plan: Plan, example: Any) -> None:
    """Try a cut that went wrong once more with the oracle that compares layer by layer; it raises with the answer."""
    want = expected(model, plan, example, absent=True)
    with untouched(model):
        carry_out(model, plan)
        check(model, example, want)


def remember(model: nn.Module, plan: Plan) -> None:
    """Keep with the model the plan that leads to it from its full size, for `save`."""
    before = plan_of(model)
    model.__dict__[_PLAN] = plan if before is None else before.then(plan)
    watch(model)


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that made a model what it is from its full size; None if it was never cut."""
    found = unwrap(model, sharded=True).__dict__.get(_PLAN)
    return found if isinstance(found, Plan) else None


def outcome(model: nn.Module) -> Outcome | None:
    """What the compensation of a model's last cut came to; None if there was none.

    >>> import secateur as sec
    >>> net, batches = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), [torch.randn(64, 4)]
    >>> plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    >>> found = sec.outcome(sec.apply(net, plan, compensate=sec.LeastSquares(batches)))
    >>> found.after < found.before, found.layers[0].name
    (True, '2.weight')
    """
    found = unwrap(model, sharded=True).__dict__.get(_OUTCOME)
    return found if isinstance(found, Outcome) else None
