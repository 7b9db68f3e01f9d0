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

_SYNC = os.fsync


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same random numbers for a test, whichever ran before it; only tests of files wait for the disk."""
    os.fsync = _SYNC if item.path.parent.name == "io" else _at_once
    seed(0)
    np.random.seed(0)
    random.seed(0)


def _at_once(descriptor: int) -> None:
    """Nothing: what a test wrote need not outlive the machine."""
