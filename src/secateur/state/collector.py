"""Python's collector of cycles, which waits while much is made at once that stays."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_waiting: list[bool] = []  # for each that wants it to wait, whether it was at work before


@contextmanager
def collected_later() -> Iterator[None]:
    """What only cycles hold goes afterwards, not meanwhile.

    What a tracing run makes stays, nearly all of it, and there is much of it: so Python would look through all objects
    that there are, which takes as long as the run where large libraries are loaded, and finds nothing.

    >>> with collected_later():
    ...     gc.isenabled()
    False
    """
    with _lock:
        _waiting.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _waiting.pop():
                gc.enable()


@contextmanager
def collected_meanwhile() -> Iterator[None]:
    """Inside of `collected_later`, for what takes memory: what only cycles hold goes as it would without that."""
    with _lock:
        resumed = any(_waiting) and not gc.isenabled()
        if resumed:
            gc.enable()
    try:
        yield
    finally:
        with _lock:
            if resumed and any(_waiting):
                gc.disable()


__all__ = ["collected_later", "collected_meanwhile"]
