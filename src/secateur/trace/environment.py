"""What the Python around a model does behind the tracer's back, laid open for the tracing run."""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from secateur.trace.sizes import Size

_CACHED = type(functools.cache(lambda: None))
# These read the digits of an int and never ask it for its value as a float.
_DIGIT_READERS = ("log", "log2", "log10", "isqrt", "gcd", "lcm", "comb", "perm", "factorial")


@contextmanager
def laid_open(model: nn.Module) -> Iterator[None]:
    """Scripted functions run as Python, caches do not answer, and functions of `math` say which sizes they read.

    What goes wrong is raised, so torch's own account of it, a log with a traceback, is left out.
    """
    homes = dict.fromkeys(kind.__module__ for module in model.modules() for kind in type(module).__mro__)
    with ExitStack() as stack:
        stack.enter_context(unscripted())
        stack.enter_context(patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        for home in (*homes, "einops.einops"):
            for owner, name, function in _caches(home):
                stack.enter_context(patch.object(owner, name, function.__wrapped__))
        for name in _DIGIT_READERS:
            stack.enter_context(patch.object(math, name, _telling(getattr(math, name))))
        yield


@contextmanager
def unscripted() -> Iterator[None]:
    """Call the Python code behind scripted functions: TorchScript would hide what its sizes are made of."""
    script = torch._C.ScriptFunction
    original = script.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = getattr(self, "_torchdynamo_inline", None)
        return original(self, *args, **kwargs) if source is None else source(*args, **kwargs)

    script.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        script.__call__ = original  # type: ignore[method-assign]


def _caches(home: str) -> Iterable[tuple[Any, str, Any]]:
    """The functions of a Python module that remember their answers by value: fake tensors, and sizes without origin."""
    module = sys.modules.get(home)
    if module is None or home.partition(".")[0] in ("torch", "builtins"):
        return
    for name, value in list(vars(module).items()):
        if isinstance(value, _CACHED) and value.__module__ == home:
            yield module, name, value
        elif isinstance(value, type) and value.__module__ == home:
            for key, method in list(vars(value).items()):
                if isinstance(method, _CACHED):
                    yield value, key, method


def _telling(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def told(*args: Any) -> Any:
        return function(*(int(a) if isinstance(a, Size) else a for a in args))

    return told
