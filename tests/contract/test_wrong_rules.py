"""The law notices a wrong rule: each of these is easily made, and the right rule passes the same draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from commutation import commutation
from sampling import Draw, Maker, Sample, call, groups_of, in_size, out_sizes

from secateur.axes import Atom, Product, resolve, unify
from secateur.compat import aten
from secateur.errors import VerifyError
from secateur.ops import record
from secateur.ops.value import Call, Value

WrongRule = Callable[..., Any]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, WrongRule], None]]:
    def put(op: Any, rule: WrongRule) -> None:
        records = record._RECORDS if record.is_op(op) else record._FUNCTIONS
        monkeypatch.setitem(records, op, record.Record(rule))
        record.record_of.cache_clear()

    yield put
    monkeypatch.undo()
    record.record_of.cache_clear()


def found(op: Any, maker: Maker, times: int = 6) -> str:
    """Everything that the law has against an op's rule."""
    failures = []
    for seed in range(times):
        sample = maker(Draw(seed))
        failures += commutation(op, sample.args, sample.kwargs, draws=3, seed=seed).failures
    return "\n".join(failures)


def rotated(draw: Draw) -> Sample:
    n = draw.n(3, 5)
    return call(draw.x(n, n, n), [1, 2, 0])


def rotated_backwards(call: Call, x: Value, order: list[int]) -> Value:
    back = [order.index(i) for i in range(len(order))]
    return Value([x.dims[i] for i in back], [x.zero[i] for i in back])


def two_side_by_side(draw: Draw) -> Sample:
    n = draw.n()
    return call([draw.x(n, 3), draw.x(n, 4)], 1)


def cat_as_a_new_axis(call: Call, tensors: list[Value], dim: int) -> Value:
    unify(tensors[0].dims[0], tensors[1].dims[0])
    return Value([tensors[0].dims[0], Atom(call.shape[1])])


def grouped(draw: Draw) -> Sample:
    ones, zeros = [1, 1], [0, 0]
    weight = draw.x(6, 3, 2, 2)
    return call(draw.x(2, 6, 4, 4), weight, None, ones, ones, ones, False, zeros, groups_of(2))


def groups_untied(call: Call, x: Value, weight: Value, *_: Any) -> Value:
    for dim in (*x.dims[2:], *weight.dims[2:]):
        call.fix(dim, "spatial")
    space = [call.fixed(n) for n in call.shape[2:]]
    return Value([x.dims[0], weight.dims[0], *space], [False, True, True, True])


def a_row_of_scores(draw: Draw) -> Sample:
    return call(draw.x(3, 5), 1, False)


def flattened(draw: Draw) -> Sample:
    return call(draw.x(3, 4), out_sizes(12))


def column_major(call: Call, x: Value, _: Any) -> Value:
    return Value([Product((x.dims[1], x.dims[0]))])


def sum_of_two(draw: Draw) -> Sample:
    return call(draw.x(3, 4), draw.x(3, 4))


def same_as_first(call: Call, x: Value, *_: Any) -> Value:
    return Value(x.dims, False)


def product(draw: Draw) -> Sample:
    return call(draw.x(3, 5), draw.x(5, 4))


def not_contracted(call: Call, a: Value, b: Value) -> Value:
    return Value([a.dims[0], b.dims[1]])


def one_tensor(draw: Draw) -> Sample:
    return call(draw.x(3, 5))


def always_zero(call: Call, x: Value) -> Value:
    return Value(x.dims, True)


def reversed_order(draw: Draw) -> Sample:
    return call(draw.x(5, 3), [0])


def summed(draw: Draw) -> Sample:
    return call(draw.x(4, 5), [1])


def sum_that_trusts(call: Call, x: Value, dim: list[int]) -> Value:
    """Removed positions need not be zero, and it does not say so."""
    return Value([x.dims[0]], [x.is_zero(0)])


def normalised(draw: Draw) -> Sample:
    return call(draw.x(3, 5), [in_size(5, 0, 1)], draw.x(5), None, 1e-5)


def norm_without_a_note(call: Call, x: Value, shape: Any, weight: Value, *_: Any) -> tuple[Value, Value, Value]:
    unify(x.dims[1], weight.dims[0])
    stats = Value([x.dims[0], call.fixed(1)], False)
    return Value(x.dims, [False, weight.is_zero(0)]), stats, Value(stats.dims, False)


def gated(draw: Draw) -> Sample:
    weights = [draw.x(12, 3), draw.x(12, 4)]
    return call(draw.x(2, 3, 3), draw.x(1, 3, 4), weights, False, 1, 0.0, False, False, False)


def gates_inside(call: Call, x: Value, state: Value, weights: list[Value], *_: Any) -> list[Value]:
    """(hidden × gates) instead of (gates × hidden)."""
    call.opaque(Value(x.dims[:1]), Value(state.dims[:1]), reason="steps")
    unify(x.dims[1], state.dims[1])
    hidden = Atom(4)
    rows = Product((hidden, call.fixed(3)))
    for weight in weights:
        unify(weight.dims[0], rows)
    unify(weights[0].dims[1], x.dims[2])
    unify(weights[1].dims[1], hidden)
    unify(state.dims[2], hidden)
    out = resolve(hidden)
    return [Value([*x.dims[:2], out], False), Value([call.fixed(1), x.dims[1], out], False)]


WRONG = {
    "permute the wrong way": (aten.permute.default, rotated, rotated_backwards),
    "cat makes a new axis": (aten.cat.default, two_side_by_side, cat_as_a_new_axis),
    "groups not tied": (aten.convolution.default, grouped, groups_untied),
    "softmax is exact": (aten._softmax.default, a_row_of_scores, same_as_first),
    "view is column-major": (aten.view.default, flattened, column_major),
    "add ties nothing": (aten.add.Tensor, sum_of_two, same_as_first),
    "mm contracts nothing": (aten.mm.default, product, not_contracted),
    "sigmoid of zero is zero": (aten.sigmoid.default, one_tensor, always_zero),
    "flip keeps positions": (aten.flip.default, reversed_order, same_as_first),
    "sum over what is not zero": (aten.sum.dim_IntList, summed, sum_that_trusts),
    "layer norm is exact": (aten.native_layer_norm.default, normalised, norm_without_a_note),
    "gates inside of hidden": (torch.gru, gated, gates_inside),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_rule_is_found(mistake: str, plant: Callable[[Any, WrongRule], None]) -> None:
    op, maker, wrong = WRONG[mistake]
    assert found(op, maker) == ""
    plant(op, wrong)
    assert found(op, maker) != ""


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("permute the wrong way", "other numbers"),
        ("cat makes a new axis", "its layouts"),
        ("add ties nothing", "the op fails"),
        ("sigmoid of zero is zero", "said to be zero"),
        ("softmax is exact", "other numbers"),
    ],
)
def test_the_complaint_says_what_is_wrong(
    mistake: str, complaint: str, plant: Callable[[Any, WrongRule], None]
) -> None:
    op, maker, wrong = WRONG[mistake]
    plant(op, wrong)
    assert complaint in found(op, maker)


def test_a_rule_of_the_wrong_shape_is_refused(plant: Callable[[Any, WrongRule], None]) -> None:
    plant(aten.t.default, same_as_first)
    with pytest.raises(AssertionError, match="made"):
        found(aten.t.default, one_tensor)


def test_an_op_without_a_rule_cannot_be_checked() -> None:
    with pytest.raises(VerifyError, match=r"aten\.svd\.default has no rule"):
        commutation(aten.svd.default, (torch.eye(3),))
    with pytest.raises(VerifyError, match="register one"):
        commutation(torch.sinh, (torch.eye(3),))


def test_cutting_inexact_axes_must_still_fit(plant: Callable[[Any, WrongRule], None]) -> None:
    """An axis that is noted is not compared by value, but its shapes are."""

    def noted_but_untied(call: Call, a: Value, b: Value) -> Value:
        call.note(a.dims[1], "not exact")
        call.note(b.dims[0], "not exact")
        return Value([a.dims[0], b.dims[1]])

    plant(aten.mm.default, noted_but_untied)
    assert "the op fails" in found(aten.mm.default, product)
