"""Schedules against the formulas of their papers, and what is refused."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur import SecateurError
from secateur.schedule import cubic, levels, linear, one_shot


def test_one_shot_is_everything_at_once():
    assert levels(one_shot()) == (1.0,)


def test_linear():
    assert levels(linear(5)) == (0.2, 0.4, 0.6, 0.8, 1.0)


def test_cubic_is_zhu_and_gupta():
    """s_t = s_f + (s_i - s_f)(1 - t/n)^3, from s_i = 0 to s_f = 1."""
    assert levels(cubic(8)) == pytest.approx([1 + (0 - 1) * (1 - t / 8) ** 3 for t in range(1, 9)])


@given(st.sampled_from([linear, cubic]), st.integers(1, 60))
def test_they_rise_to_one_in_as_many_steps_as_asked(make, steps):
    found = levels(make(steps))
    assert len(found) == steps
    assert found[-1] == 1.0
    assert all(0 < a < b for a, b in pairwise(found))
    assert make(steps)(steps + 3) == 1.0


def test_any_function_is_a_schedule():
    assert levels(lambda step: [0, 0.5, 0.5, 1][step - 1]) == (0.0, 0.5, 0.5, 1.0)
    assert levels(lambda step: sum([0.1] * step)) == pytest.approx([0.1 * n for n in range(1, 11)])  # 0.9999999…
    assert levels(lambda step: sum([0.1] * step))[-1] == 1.0


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        pytest.param(lambda step: 1.5, "1.5 for step 1", id="above"),
        pytest.param(lambda step: -0.1, "-0.1 for step 1", id="below"),
        pytest.param(lambda step: math.nan, "nan for step 1", id="nan"),
        pytest.param(lambda step: "half", "'half' for step 1", id="text"),
        pytest.param(lambda step: True, "True for step 1", id="bool"),
        pytest.param(lambda step: 0.5 / step, "falls from 0.5 to 0.25 at step 2", id="falling"),
        pytest.param(lambda step: 0.3, "at 0.3 after 1000 steps", id="endless"),
        pytest.param(linear, "with the number of steps", id="not called"),
        pytest.param(5, "a function of a step", id="number"),
    ],
)
def test_no_schedule(schedule, words):
    with pytest.raises(SecateurError, match=words):
        levels(schedule)


@pytest.mark.parametrize("make", [linear, cubic])
@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "3", None, 1001])
def test_no_number_of_steps(make, steps):
    with pytest.raises(SecateurError, match="a number of steps from 1 to 1000"):
        make(steps)
