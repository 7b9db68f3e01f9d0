"""Set-up that every test shares."""

import os
import random
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# torchvision's wheel may be linked to CUDA. Beside a CPU build of torch its C++ operators do not load then, and its
# import fails on the two that it looks up at once; declaring them is enough for everything but torchvision.ops.
try:
    torch.ops.load_library(Path(find_spec("torchvision").origin).with_name("_C.so"))
except OSError:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

torch.set_num_threads(1)

# Random tests draw the same every time, in whatever order and process they run; `make fuzz` looks for new cases.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same random numbers for a test, whichever ran before it."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
