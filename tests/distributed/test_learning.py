"""A model that two ranks train while it is pruned: one result on both, that of one process with all their data."""

import pytest
from processes import result, run

KINDS = ("cuts", "learned", "gmp", "rigl", "set_", "srste")
JOBS = [*KINDS, "wrapped_in_other_ways", "compressed_gradients", "average", "goes_on", "failed_cut"]


@pytest.fixture(scope="module")
def two():
    found = run(2, JOBS, limit=800)
    return lambda name: [result(rank, name) for rank in found]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_do_what_one_process_does(two, kind):
    first, second = two(kind)
    assert first == second
    assert first["far"] < 1e-5
    assert kind not in ("cuts", "learned") or first["shapes"][0] != [24, 6]


def test_options_of_the_wrapper_and_accumulated_gradients(two):
    first, second = two("wrapped_in_other_ways")
    assert first == second
    assert len(first) == 2
    for name, (_, far) in first.items():
        assert far < 1e-5, name


def test_communication_hooks(two):
    first, second = two("compressed_gradients")
    assert first == second
    assert first["far"] < 1e-2  # gradients were in half precision
    assert "a communication hook with a state" in first["said"]
    assert "wrap the model anew" in first["said"]
    assert first["same"]


def test_averages_are_cut_along(two):
    (cut, averaged, weights), second = two("average")
    assert [cut, averaged, weights] == second
    assert cut == averaged
    assert cut[0] != [24, 6]


def test_going_on_from_a_file(two):
    first, second = two("goes_on")
    assert first == second
    for whole, again, same_log in first.values():
        assert whole == again
        assert same_log


@pytest.mark.slow
def test_a_compiled_wrapper():
    first, second = (result(rank, "compiled") for rank in run(2, ["compiled"]))
    assert first == second
    assert first[1] < 1e-5


def test_a_cut_that_fails_leaves_gradients_shared(two):
    first, second = two("failed_cut")
    assert first == second
    assert first[1]
