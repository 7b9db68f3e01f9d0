"""A model that is the same after it has seen the user's data, and whom to blame if it fails on them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from secateur.calibrate import calibrating
from secateur.errors import CalibrationError, SecateurError
from secateur.state.transaction import untouched


def check_values(model: nn.Module, tensors: Iterable[Tensor], what: str) -> None:
    """Refuse a model of which some tensors are on 'meta'."""
    if any(tensor.is_meta for tensor in tensors):
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


@contextmanager
def blamed_on_batch(number: int, what: str, asked: str = "model(batch)") -> Iterator[None]:
    """An error of the user's own code says which batch it did not take."""
    try:
        yield
    except SecateurError:
        raise
    except Exception as error:  # any code of the user's may run here
        raise CalibrationError(f"{what}: {asked} failed on batch {number}: {because(error)}") from error


def because(error: Exception) -> str:
    """An error of the user's own code in one line, with what to do about the usual one."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TypeError) and "positional argument" in text:
        text += (
            ". A batch is what the model is called with: of inputs and labels, give [inputs for inputs, _ in loader]"
        )
    return text
