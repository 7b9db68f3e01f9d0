"""Proof of a cut model that is there beside the full-size one, as where both are in files or spread over ranks."""

from torch import nn

from secateur.errors import VerifyError
from secateur.planning.plans import Plan
from secateur.tracing.examples import placed_with
from secateur.verify.numbers import numbers_of
from secateur.verify.oracle import check, expected
from secateur.verify.run import Values


def prove(
    whole: nn.Module, cut: nn.Module, plan: Plan, values: tuple[Values, Values] | tuple[None, None] = (None, None)
) -> None:
    """Refuse a cut model that does not put out, on the example and on others, what the full-size one says it must.

    `values` give, for both models, those of parameters that have none here.
    """
    old, new = values
    for number, example in enumerate((plan.example, *plan.others) if plan.axes else ()):
        example = placed_with(whole, example)
        try:
            want = expected(whole, plan, example, values=old)
        except VerifyError:
            if number:  # fake tensors have no values that could be out of range
                continue
            raise
        try:
            check(cut, example, want, new)
        except VerifyError:
            if all(axis.exact for axis in plan.axes):
                raise
            numbers = numbers_of(cut, example, want.dtype, new)
            check(cut, example, expected(whole, plan, example, numbers=numbers, values=old), new)
