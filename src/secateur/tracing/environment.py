"""What the Python around a model does behind the tracer's back, laid open for the tracing run."""

import functools
import inspect
import logging
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import nn

from secateur.compat import FAKE_LOGGER
from secateur.sizes.explain import Explainer
from secateur.sizes.size import Size, as_value
from secateur.state.held import every_module
from secateur.state.leftovers import CACHED, classes, of_ours
from secateur.state.patches import OWN_ATTENTION, SLOW_ATTENTION, UNSCRIPTED, Patch, patched
from secateur.tracing.stated import functions_of, words

# These read the digits of an int and never ask it for its value as a float.
_DIGIT_READERS = ("log", "log2", "log10", "isqrt", "gcd", "lcm", "comb", "perm", "factorial")
_ASKING: WeakKeyDictionary[type, bool] = WeakKeyDictionary()  # classes, and whether their code asks for gradients
_OTHERS = ("sqrt", "exp", "pow")  # do, but what they make of it is a number of which the size has told, too


@contextmanager
def laid_open(model: nn.Module, sizes: Explainer | None = None) -> Iterator[None]:
    """Scripted functions run as Python, attention as single ops, caches do not answer, and functions of `math` say
    which sizes they read, and tell `sizes` what they make of them.

    What goes wrong is raised, so torch's own account of it, a log with a traceback, is left out.
    """
    silent = patch.object(logging.getLogger(FAKE_LOGGER), "disabled", True)
    with silent, patched(UNSCRIPTED, SLOW_ATTENTION, OWN_ATTENTION, *_telling(sizes), *uncached(model)):
        yield


def gradients(model: nn.Module) -> AbstractContextManager[Any]:
    """None are kept track of, but where a model's own code asks for them: fast weights, forces, a penalty."""
    return torch.enable_grad() if asks_for_gradients(model) else torch.no_grad()


def asks_for_gradients(model: nn.Module) -> bool:
    """Whether the code of a model, or a function of the user's that it names, calls `torch.autograd.grad`."""
    held = [one for module in every_module(model) for one in vars(module).values() if type(one) is FunctionType]
    return _ask(held) or any(_class_asks(kind) for kind in classes(model))


def _class_asks(kind: type) -> bool:
    if kind not in _ASKING:
        _ASKING[kind] = _ask(functions_of(kind))
    return _ASKING[kind]


def _ask(functions: Iterable[FunctionType]) -> bool:
    todo, seen = list(functions), set[int]()
    while todo:
        function = inspect.unwrap(todo.pop())
        if id(function) in seen or not isinstance(function, FunctionType):  # a compiled module has its own around it
            continue
        seen.add(id(function))
        names = words(function.__code__)
        found = [function.__globals__[name] for name in names if name in function.__globals__]
        if torch.autograd.grad in found or {"autograd", "grad"} <= names:
            return True
        todo += [f for f in found if isinstance(f, FunctionType) and not of_ours(f.__module__)]
    return False


def uncached(model: nn.Module) -> list[Patch]:
    """What a model's code remembers by value (fake tensors, sizes without origin) is computed anew."""
    homes = dict.fromkeys([*(kind.__module__ for kind in classes(model)), "einops.einops"])
    return [patch for home in homes for patch in _caches(home)]


def _caches(home: str) -> Iterator[Patch]:
    """The functions of a Python module that remember their answers, and what they are without that."""
    for name, value in list(vars(sys.modules[home]).items()) if home in sys.modules else ():
        if isinstance(value, CACHED) and value.__module__ == home:
            yield sys.modules[home], name, value.__wrapped__
        elif isinstance(value, type) and value.__module__ == home:
            methods = ((key, method) for key, method in list(vars(value).items()) if isinstance(method, CACHED))
            yield from ((value, key, method.__wrapped__) for key, method in methods)


_READERS = {name: getattr(math, name) for name in (*_DIGIT_READERS, *_OTHERS)}


def _telling(sizes: Explainer | None) -> list[Patch]:
    return [(math, name, _told(function, sizes)) for name, function in _READERS.items()]


def _told(function: Callable[..., Any], sizes: Explainer | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def told(*args: Any) -> Any:
        name = f"{function.__name__}()"
        result = function(*(as_value(a, name) if isinstance(a, Size) else a for a in args))
        if sizes is not None and type(result) is float and any(isinstance(a, Size) or sizes.is_told(a) for a in args):
            sizes.tell(result)
        return result

    return told


def line_of(error: Exception) -> str:
    """The line of the user's own code that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    not_theirs = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    theirs = [f for f in frames if not f.filename.startswith(not_theirs)]
    return f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else ""
