"""Functions of other libraries, replaced for whoever asks: other threads go on with the originals."""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from secateur.compat import ScriptFunction, script_source
from secateur.nn.attention import forward

Patch = tuple[Any, str, Any]  # whose attribute, its name, and what takes its place

_asked: ContextVar[Mapping[tuple[int, str], Any]] = ContextVar("asked", default={})  # noqa: B039
_installed: dict[tuple[int, str], list[Any]] = {}  # the original, and how many ask for another
_lock = threading.Lock()


@contextmanager
def patched(*patches: Patch) -> Iterator[None]:
    """Other functions in the place of some; in other threads, the originals go on to be called.

    >>> import math
    >>> with patched((math, "sqrt", lambda x: 7)):
    ...     math.sqrt(4)
    7
    >>> math.sqrt(4)
    2.0
    """
    with _lock:
        for owner, name, _ in patches:
            _install(owner, name)
    token = _asked.set({**_asked.get(), **{(id(owner), name): new for owner, name, new in patches}})
    try:
        yield
    finally:
        _asked.reset(token)
        with _lock:
            for owner, name, _ in patches:
                _remove(owner, name)


def _install(owner: Any, name: str) -> None:
    key = (id(owner), name)
    if key in _installed:
        _installed[key][1] += 1
        return
    original = getattr(owner, name)
    _installed[key] = [original, 1]

    @functools.wraps(original)
    def whichever(*args: Any, **kwargs: Any) -> Any:
        return _asked.get().get(key, original)(*args, **kwargs)

    for attribute in ("cache_clear", "cache_info", "cache_parameters"):
        if hasattr(original, attribute):
            setattr(whichever, attribute, getattr(original, attribute))
    setattr(owner, name, whichever)


def _remove(owner: Any, name: str) -> None:
    key = (id(owner), name)
    entry = _installed[key]
    entry[1] -= 1
    if not entry[1]:
        del _installed[key]
        setattr(owner, name, entry[0])


_run_script: Callable[..., Any] = ScriptFunction.__call__


def _run_source(self: Any, *args: Any, **kwargs: Any) -> Any:
    source = script_source(self)
    return _run_script(self, *args, **kwargs) if source is None else source(*args, **kwargs)


SLOW_ATTENTION: Patch = (torch.backends.mha, "get_fastpath_enabled", lambda: False)  # its fast path is one op
OWN_ATTENTION: Patch = (nn.MultiheadAttention, "forward", forward(lambda _: None))
UNSCRIPTED: Patch = (ScriptFunction, "__call__", _run_source)  # TorchScript would hide what its sizes are made of


__all__ = ["OWN_ATTENTION", "Patch", "SLOW_ATTENTION", "UNSCRIPTED", "patched"]
