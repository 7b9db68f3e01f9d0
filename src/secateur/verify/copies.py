"""Does a copy of a model compute what the model does?"""

import copy
from typing import Any

import torch
from torch import nn

from secateur.state.transaction import untouched
from secateur.verify.run import outputs


def copies_alike(model: nn.Module, example: Any) -> bool:
    """Whether a deep copy can be made, and puts out the same, bit for bit.

    >>> copies_alike(nn.Linear(2, 2), torch.zeros(1, 2))
    True

    Functions are not copied, so a hook of the copy may write into the model, which is put back.
    """
    with untouched(model) as undo:
        undo.keep(*model.buffers())
        try:
            other = copy.deepcopy(model)
            runs = [outputs(each, example, torch.float32) for each in (model, other)]
        except Exception:  # of the user's own making
            return False
    return all(a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all()) for a, b in zip(*runs, strict=True))
