"""Proof of a cut model that is there beside the full-size one, as where both are in files."""

from torch import nn

from secateur.errors import VerifyError
from secateur.planning.plans import Plan
from secateur.verify.numbers import numbers_of
from secateur.verify.oracle import check, expected


def prove(whole: nn.Module, cut: nn.Module, plan: Plan) -> None:
    """Refuse a cut model that does not put out, on the example and on others, what the full-size one says it must."""
    for number, example in enumerate((plan.example, *plan.others) if plan.axes else ()):
        try:
            want = expected(whole, plan, example)
        except VerifyError:
            if number:  # fake tensors have no values that could be out of range
                continue
            raise
        try:
            check(cut, example, want)
        except VerifyError:
            if all(axis.exact for axis in plan.axes):
                raise
            check(cut, example, expected(whole, plan, example, numbers=numbers_of(cut, example, want.dtype)))
