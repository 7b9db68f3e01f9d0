"""Lets torchvision, and so timm and Transformers, be imported beside a CPU build of torch."""

from importlib.util import find_spec
from pathlib import Path

import torch

# torchvision's wheel may be linked to CUDA. Beside a CPU build of torch its C++ operators do not load then, and its
# import fails on the two that it looks up at once; declaring them is enough for everything but torchvision.ops.
try:
    torch.ops.load_library(Path(find_spec("torchvision").origin).with_name("_C.so"))
except OSError:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
