"""The state of the random generators survives JSON, and what cannot be used changes none of them."""

import json
import random

import numpy as np
import pytest
import torch

from secateur import FileError
from secateur.schedule.checkpoint import random_state, set_random_state


def drawn():
    """From each generator, with draws that leave a second number waiting."""
    return torch.randn(3).tolist(), np.random.randn(3).tolist(), [random.gauss(0, 1) for _ in range(3)]


def test_through_json():
    drawn()
    state = json.dumps(random_state())
    first = drawn()
    assert drawn() != first
    set_random_state(json.loads(state))
    assert drawn() == first


@pytest.mark.parametrize("broken", ["torch", "numpy", "python"])
@pytest.mark.parametrize("value", [None, "", "AAAA", [], [1, 2, 3], {}], ids=str)
def test_all_or_nothing(broken, value):
    before = json.dumps(random_state())
    random.random(), np.random.rand(), torch.rand(1)
    now = json.dumps(random_state())
    with pytest.raises(FileError, match="random generators cannot be used"):
        set_random_state(json.loads(before) | {broken: value})
    assert json.dumps(random_state()) == now


def test_another_generator_of_numpy_is_refused():
    old = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        with pytest.raises(FileError, match="PCG64"):
            random_state()
    finally:
        np.random.set_bit_generator(old)


def test_a_position_beyond_the_end_is_refused():
    """NumPy would take it and read what lies behind."""
    state = json.loads(json.dumps(random_state()))
    state["numpy"]["state"]["pos"] = 10**6
    with pytest.raises(FileError, match="no state of NumPy's"):
        set_random_state(state)
