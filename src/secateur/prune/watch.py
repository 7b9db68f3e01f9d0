"""Has a tensor been written to since?

Version counters miss writes through `.data`, so they cannot answer that. Copy-on-write storage can: a
storage that is marked as lazily cloned loses the mark at the first access that may write to it, whichever
alias or kernel that access comes from. The clone itself is dropped at once, so nothing is ever copied and the
data never moves. A stamp on the storage tells two watchers of one storage apart.

What cannot be watched (shared memory, memory owned by NumPy, fake tensors, tensor subclasses, functorch
wrappers) is reported as such, and its user has to recompute every time.
"""

import torch
from torch import Tensor, nn

from secateur.compat import is_lazy_clone, lazy_clone, transform_level

_KEY = "_secateur_stamp"
_PLAIN = (Tensor, nn.Parameter)


class Stamp:
    """What `watch` hands out and `unchanged` compares by identity."""

    __slots__ = ()


def ordinary(tensor: Tensor) -> bool:
    """Whether `tensor` is plain data: not fake nor of another subclass, not inside a function transform."""
    return type(tensor) in _PLAIN and transform_level() is None


def watch(tensor: Tensor) -> Stamp | None:
    """Start to watch `tensor` for writes; None if it cannot be watched.

    >>> t = torch.zeros(2)
    >>> stamp = watch(t)
    >>> unchanged(t, stamp)
    True
    >>> _ = t.data.add_(1)
    >>> unchanged(t, stamp)
    False
    """
    if lazy_clone is None or is_lazy_clone is None or not ordinary(tensor):
        return None
    try:
        attributes = tensor.untyped_storage().__dict__
        if not is_lazy_clone(tensor):
            attributes.pop(_KEY, None)
            with torch.no_grad():
                lazy_clone(tensor.detach())
        stamp: Stamp = attributes.setdefault(_KEY, Stamp())
    except (RuntimeError, NotImplementedError):  # the storage is not one that torch allocated plainly
        return None
    return stamp if is_lazy_clone(tensor) else None


def unchanged(tensor: Tensor, stamp: Stamp | None) -> bool:
    """Whether nothing has had the chance to write to `tensor` since `watch` returned `stamp`."""
    if stamp is None or is_lazy_clone is None or not is_lazy_clone(tensor):
        return False
    return tensor.untyped_storage().__dict__.get(_KEY) is stamp
