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


def like(example: Any, batch: Any) -> Any:
    """A batch without what the example does not have: labels behind the inputs, further entries of a dict.

    >>> like(torch.zeros(1, 4), (torch.ones(8, 4), "labels")).shape
    torch.Size([8, 4])
    >>> sorted(like({"ids": 1, "mask": 1}, {"ids": 2, "mask": 2, "labels": 2}))
    ['ids', 'mask']
    """
    several = isinstance(batch, tuple | list)
    if isinstance(example, tuple | list):
        return tuple(batch[: len(example)]) if several else batch
    if several and len(batch) > 1 and isinstance(batch[0], Mapping if isinstance(example, Mapping) else Tensor):
        batch = batch[0]
    if isinstance(example, Mapping) and isinstance(batch, Mapping) and example.keys() <= batch.keys():
        return {name: batch[name] for name in example}
    return batch


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
    return CalibrationError(f"{what}: {asked} failed on batch {number}: {because(error)}")


def because(error: Exception) -> str:
    """An error of the user's own code in one line, with what to do about the usual one."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TypeError) and "positional argument" in text:
        text += (
            ". A batch is what the model is called with: of inputs and labels, give [inputs for inputs, _ in loader]"
        )
    return text
