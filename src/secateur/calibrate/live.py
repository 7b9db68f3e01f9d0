"""How much memory a run of a model takes for what its ops make."""

from __future__ import annotations

from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.trace.capture import tensors_in


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that ops make, as long as anything holds them; `peak` is the most there were.

    >>> import torch
    >>> with Live() as live:
    ...     x = torch.ones(1000)
    ...     for _ in range(5):
    ...         x = x + 1
    >>> live.peak
    8000
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # a view, or a result put into what was there
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._held.values()))
        return out
