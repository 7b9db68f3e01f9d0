"""A model that is the same after it has seen the user's data, and whom to blame if it fails on them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate.observe import calibrating
from secateur.compat import is_lazy
from secateur.errors import CalibrationError, SecateurError
from secateur.state.transaction import untouched
from secateur.tracing.examples import tensors_in


def check_values(model: nn.Module, tensors: Iterable[Tensor], what: str) -> None:
    """Refuse a model of which some tensors are on 'meta', or have not even a shape."""
    for tensor in tensors:
        if is_lazy(tensor):
            raise CalibrationError(
                f"{what}: {type(model).__name__} has lazy layers that have not run; call the model once first"
            )
        if tensor.is_meta:
            raise CalibrationError(
                f"{what}: {type(model).__name__} has tensors without values (on 'meta'); load them first"
            )


@contextmanager
def studied(model: nn.Module, what: str) -> Iterator[None]:
    """The model in eval mode; afterwards it is as it was, and so are the values of its buffers."""
    check_values(model, (*model.parameters(), *model.buffers()), what)
    with untouched(model) as undo, calibrating(model):
        undo.keep(*model.buffers())
        yield


def batch_name(number: int) -> str:
    """How people call a batch: they count from one."""
    return f"batch {number + 1}"


def check_batch(batch: Any, number: int, what: str) -> None:
    """Refuse a batch with NaN or infinity in it. (Minus infinity is what masks are made of.)

    >>> check_batch((torch.zeros(2), torch.tensor([1.0, float("nan")])), 2, "reading")
    Traceback (most recent call last):
    secateur.errors.CalibrationError: reading: batch 3: it is not finite: there is NaN or infinity in it; ...
    """
    found = [tensor for tensor in tensors_in(batch) if _has_numbers(tensor)]
    wrong = [(tensor.isnan() | tensor.isposinf()).any().to(found[0].device) for tensor in found]
    if wrong and bool(torch.stack(wrong).any()):  # one question to the device
        raise CalibrationError(
            f"{what}: {batch_name(number)}: it is not finite: there is NaN or infinity in it; mend the data, or leave "
            "the batch out"
        )


def _has_numbers(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return plain and tensor.is_floating_point() and tensor.element_size() > 1


@contextmanager
def blamed_on_batch(number: int, what: str, asked: str = "model(batch)") -> Iterator[None]:
    """An error of the user's own code says which batch it did not take."""
    try:
        yield
    except SecateurError:
        raise
    except Exception as error:  # any code of the user's may run here
        raise CalibrationError(f"{what}: {asked} failed on {batch_name(number)}: {because_of_batch(error)}") from error


def because(error: Exception) -> str:
    """An error of the user's own code in one line."""
    return f"{type(error).__name__}: {error}"


def because_of_batch(error: Exception) -> str:
    """That of a model, called with a batch, and what to do about the usual one."""
    text = because(error)
    if isinstance(error, TypeError) and "positional argument" in text:
        text += (
            ". A batch is what the model is called with: of inputs and labels, give [inputs for inputs, _ in loader]"
        )
    return text
