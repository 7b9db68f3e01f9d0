"""Torch functions that ask a tensor for its sizes."""

import torch
from torch import Tensor

from secateur.ops.record import named

SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
LENGTHS = {Tensor.size, *named("size.int size.default sym_size.int sym_size.default")}  # of one dimension, or all
COUNTS = {Tensor.numel, Tensor.nelement, torch.numel, *named("sym_numel.default")}  # of elements
