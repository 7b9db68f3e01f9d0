"""The user's data, batch by batch, and a model that is the same after it has seen them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import calibrating
from secateur.errors import CalibrationError
from secateur.progress import progress


def each(batches: Any, what: str) -> Iterator[Any]:
    """Every batch, one at a time, under a progress bar; at least one.

    >>> list(each([1, 2], "reading")), list(each(lambda: iter([1, 2]), "reading"))
    ([1, 2], [1, 2])

    `batches` is an iterable, or a function without arguments that makes one.
    """
    made = batches() if callable(batches) and not isinstance(batches, Iterable) else batches
    if isinstance(made, Tensor | str | bytes | Mapping) or not isinstance(made, Iterable):
        raise CalibrationError(
            f"{what}: batches is an iterable of batches, such as a list or a DataLoader, not a {type(made).__name__}"
        )
    empty = True
    for batch in progress(made, what):
        empty = False
        yield batch
    if empty:
        raise CalibrationError(
            f"{what}: there are no batches. A generator is used up after one pass: give a list, a DataLoader, or the "
            "function that makes the generator"
        )


@contextmanager
def studied(model: nn.Module, what: str) -> Iterator[None]:
    """The model in eval mode; afterwards it is as it was, and so are the values of its buffers."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise CalibrationError(
            f"{what}: {type(model).__name__} has tensors without values (on 'meta'); load them first"
        )
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with calibrating(model):
            yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


def failed(what: str, number: int, asked: str, error: Exception) -> CalibrationError:
    """The error for a batch that the user's own code did not take."""
    return CalibrationError(f"{what}: {asked} failed on batch {number}: {type(error).__name__}: {error}")
