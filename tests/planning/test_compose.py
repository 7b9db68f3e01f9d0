"""Two plans, one after the other, as one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import secateur as sec
from secateur.pipeline.apply import plan_of
from secateur.planning import AxisPlan, Change, Plan
from secateur.state.held import Place
from secateur.surgery.cut import select


def plan(kept, shapes, attributes=(), **more):
    return Plan((), kept, shapes, attributes, **more)


def test_positions_of_positions():
    first = plan({"w": {0: (1, 3, 5, 7)}}, {"w": (8, 4)})
    second = plan({"w": {0: (0, 3), 1: (2,)}, "v": {0: (1,)}}, {"w": (4, 4), "v": (2,)})
    both = first.then(second)
    assert both.kept == {"w": {0: (1, 7), 1: (2,)}, "v": {0: (1,)}}
    assert both.shapes == {"w": (8, 4), "v": (2,)}


def test_attributes_go_from_the_first_value_to_the_last():
    width, depth, heads = (Place("", (name,)) for name in ("width", "depth", "heads"))
    first = plan({}, {}, ((width, 16, 8), (depth, 4, 2)))
    second = plan({}, {}, ((width, 8, 4), (heads, 6, 3)))
    assert set(first.then(second).attributes) == {(width, 16, 4), (depth, 4, 2), (heads, 6, 3)}


def test_held_tensors_costs_and_axes():
    place = Place("", ("mask",))
    first = Plan((AxisPlan("a", 8, (0, 2, 4, 6), True),), {}, {}, (), ((place, {0: (0, 2, 4, 6)}),), Change(9, 6))
    second = Plan((AxisPlan("a", 4, (1, 3), True),), {}, {}, (), ((place, {0: (1, 3)}),), Change(6, 2))
    both = first.then(second)
    assert both.kept_in_attributes == ((place, {0: (2, 6)}),)
    assert both.macs == Change(9, 2)
    assert both.axes == (AxisPlan("a", 8, (2, 6), True),)


def test_a_second_plan_that_does_not_fit():
    first = plan({"w": {0: (1, 3)}}, {"w": (8,)})
    with pytest.raises(sec.PlanError, match="keeps position 2 of w, of which the first left fewer"):
        first.then(plan({"w": {0: (0, 2)}}, {"w": (8,)}))


@st.composite
def two_cuts(draw):
    size = draw(st.integers(1, 12))
    first = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    second = sorted(draw(st.sets(st.integers(0, len(first) - 1), min_size=1)))
    return size, tuple(first), tuple(second)


@given(rows=two_cuts(), columns=two_cuts())
def test_selecting_at_once_is_selecting_twice(rows, columns):
    tensor = torch.arange(rows[0] * columns[0]).reshape(rows[0], columns[0])
    first = plan({"w": {0: rows[1], 1: columns[1]}}, {"w": tuple(tensor.shape)})
    middle = select(tensor, first.kept["w"])
    second = plan({"w": {0: rows[2], 1: columns[2]}}, {"w": tuple(middle.shape)})
    at_once = select(tensor, first.then(second).kept["w"])
    assert torch.equal(at_once, select(middle, second.kept["w"]))


def test_cutting_at_once_is_cutting_twice():
    torch.manual_seed(0)

    def build():
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()

    x = torch.randn(2, 3, 16)
    twice = build()
    for ratio in (0.25, 0.5):
        sec.apply(twice, sec.plan(sec.trace(twice, x), sec.Ratio(ratio)))
    once = sec.apply(build(), plan_of(twice))
    assert torch.equal(once(x), twice(x))
    assert plan_of(once) == plan_of(twice)
    assert sum(p.numel() for p in once.parameters()) < sum(p.numel() for p in build().parameters()) / 2
