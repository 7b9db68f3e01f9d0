"""Set-up that every test shares."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torchvision_ops  # noqa: F401  before anything imports torchvision
from secateur.state.chances import seed

torch.set_num_threads(1)

# Random tests draw the same every time, in whatever order and process they run; `make fuzz` looks for new cases.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same random numbers for a test, whichever ran before it."""
    seed(0)
    np.random.seed(0)
    random.seed(0)
