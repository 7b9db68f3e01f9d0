"""Set-up that every test shares."""

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# torchvision's wheel is linked to CUDA. Beside a CPU build of torch its C++ operators do not load, and its
# import fails on the two that it looks up at once; declaring them is enough for everything but torchvision.ops.
for schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
):
    name, _, rest = schema.partition("(")
    if not hasattr(torch.ops.torchvision, name):
        torch.library.define(f"torchvision::{name}", "(" + rest)

torch.set_num_threads(1)
