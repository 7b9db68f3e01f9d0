"""How a model is built, as data that a file can hold, and the way back: which call of whose code that means here.

The way back is where files of unknown origin are met. Nothing is imported or called because a file says so: a name is
looked up only among the models of four libraries, and only what these take as a description of a model is passed on.
Any other model is built by what the caller passes as `make`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from secateur.errors import FileError
from secateur.tracing.constructor import Maker
from secateur.tracing.makers import Created, from_config

_LONGEST = 2**20  # characters of arguments
_TUPLE = "tuple"  # the one key of an object that stands for a tuple
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


@dataclass(frozen=True)
class Origin:
    """A call that builds a model: of a library's, or of the user's own (then `library` is empty)."""

    library: str
    name: str  # of the class or function
    arguments: str | None  # as JSON; None where they are more than plain values

    @staticmethod
    def of(maker: Maker) -> Origin:
        """What of a call can be written down.

        >>> Origin.of(Maker(nn.Linear, {"in_features": 4, "out_features": 8}))
        Origin(library='', name='Linear', arguments='{"in_features":4,"out_features":8}')
        """
        library, name = _named(maker.function)
        try:
            text = json.dumps(_plain(dict(maker.arguments)), separators=(",", ":"), sort_keys=True, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            text = None
        return Origin(library, name, text if text is not None and len(text) <= _LONGEST else None)

    def maker(self, make: Callable[..., Any] | None = None) -> Maker:
        """The call that this means here; `make` is the class or function of the user's own.

        >>> Origin("", "Linear", '{"in_features":4,"out_features":8}').maker(nn.Linear).build({})
        Linear(in_features=4, out_features=8, bias=True)
        """
        if self.arguments is None:
            raise FileError(f"it does not hold the arguments of {self.name}; {_MAKE}")
        if make is not None:
            named = getattr(make, "__qualname__", type(make).__name__)
            if named != self.name:
                raise FileError(f"it holds what {self.name} builds, make= is {named}")
            return Maker(_caller(make), self._given())
        if self.library not in _LIBRARIES:
            raise FileError(f"it holds what {self} builds, which is no model of {', '.join(_LIBRARIES)}; {_MAKE}")
        return _LIBRARIES[self.library](self.name, self._given())

    def __str__(self) -> str:
        given = [] if self.arguments is None else [f"{k}={v!r:.20}" for k, v in list(self._given().items())[:4]]
        more = "…" if self.arguments is None or len(self._given()) > 4 else ""
        return f"{self.name[:80]}({', '.join([*given, *([more] if more else [])])})"[:200]

    def _given(self) -> dict[str, Any]:
        try:
            given = _back(json.loads(self.arguments or "{}"))
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise FileError("the arguments that it was built with are no JSON object; it is damaged")
        return given


_MAKE = (
    "pass what builds it (load(path, make=Net) calls Net with the arguments in the file, make=functools.partial(Net, "
    "width=64) as you say), or a model of full size (load(path, model))"
)


def _plain(value: Any) -> Any:
    """A value as JSON has it; tuples are told from lists. TypeError for anything else than plain values."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return [*map(_plain, value)] if isinstance(value, list) else {_TUPLE: [*map(_plain, value)]}
    if isinstance(value, Mapping) and all(type(key) is str for key in value) and [*value] != [_TUPLE]:
        return {key: _plain(each) for key, each in value.items()}
    raise TypeError(f"a {type(value).__name__} is no plain value")


def _back(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_back, value)]
    if isinstance(value, dict):
        if [*value] == [_TUPLE] and isinstance(value[_TUPLE], list):
            return tuple(map(_back, value[_TUPLE]))
        return {key: _back(each) for key, each in value.items()}
    return value


def _named(function: Callable[..., Any]) -> tuple[str, str]:
    """The library and the name of what a maker calls."""
    if isinstance(function, Created):
        return "timm", function.name
    if isinstance(function, functools.partial):  # from_config
        function = function.args[0]
    library = str(getattr(function, "__module__", "")).partition(".")[0]
    name = str(getattr(function, "__qualname__", type(function).__name__))
    home = sys.modules.get("torchvision.models" if library == "torchvision" else library)
    known = library in _LIBRARIES and getattr(home, name, None) is function
    return library if known else "", name


def _caller(make: Callable[..., Any]) -> Callable[..., Any]:
    """How a class or function of the user's own takes the arguments in a file."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if base is not None and isinstance(make, type) and issubclass(make, base):
        return functools.partial(from_config, make)
    return make


# the libraries -------------------------------------------------------------------------------------------------------


def _transformers(name: str, given: dict[str, Any]) -> Maker:
    kind = _class("transformers", "PreTrainedModel", name)
    for key, value in _entries(given):
        wrong = value not in _IMPLEMENTATIONS if key.endswith("_implementation") else key in _NOT_SIZES
        if wrong and value is not None:
            raise FileError(f"its configuration sets {key!r:.80} to {value!r:.80}, which is more than a description")
    return Maker(functools.partial(from_config, kind), given)


_IMPLEMENTATIONS = ("eager", "sdpa", "grouped_mm", "batched_mm")  # others may be names of code to be fetched
_NOT_SIZES = frozenset(
    ("auto_map", "fusion_config", "kernel_config", "quantization_config", "transformers_weights", "trust_remote_code")
)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of objects, at any depth."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield str(key), each
        if isinstance(each, dict | list | tuple):
            yield from _entries(each)


def _diffusers(name: str, given: dict[str, Any]) -> Maker:
    kind = _class("diffusers", "ModelMixin", name)
    taken = inspect.signature(kind.__init__).parameters
    odd = next((key for key in given if key not in taken), None)
    if odd is not None or any(key == "quantization_config" for key, _ in _entries(given)):
        raise FileError(f"{name} takes no argument {odd or 'quantization_config'!r:.80}")
    return Maker(kind, given)


def _timm(name: str, given: dict[str, Any]) -> Maker:
    timm = _library("timm")
    if not timm.is_model(name):
        raise FileError(f"timm has no model {name!r:.80}; is this timm older than what saved it?")
    own = inspect.signature(timm.create_model).parameters
    odd = next((key for key in given if key in own), None)
    if odd is not None:
        raise FileError(f"it sets {odd!r:.80} to {given[odd]!r:.80}, which is more than a description of {name}")
    return Maker(Created(name), given)


def _torchvision(name: str, given: dict[str, Any]) -> Maker:
    models = _library("torchvision").models
    function = getattr(models, name, None)
    if name not in models.list_models() or not callable(function):
        raise FileError(f"torchvision has no model {name!r:.80}")
    return Maker(function, {key: value for key, value in given.items() if not key.startswith("weights")})


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)  # one of the four
    except ImportError as error:
        raise FileError(f"it holds a model of {name}, which cannot be imported here: {error}") from error


def _class(library: str, base: str, name: str) -> Any:
    """A class that a library offers by this name, if it is one of its own models."""
    home = _library(library)
    kind: Any = getattr(home, name, None) if _NAME.fullmatch(name) and "." not in name else None
    own = isinstance(kind, type) and kind.__module__.partition(".")[0] == library
    if own and issubclass(kind, getattr(home, base)) and issubclass(kind, nn.Module):
        return kind
    raise FileError(f"{library} has no model {name!r:.80}; is it another version than the one that saved it?")


_LIBRARIES: dict[str, Callable[[str, dict[str, Any]], Maker]] = {
    "transformers": _transformers,
    "diffusers": _diffusers,
    "timm": _timm,
    "torchvision": _torchvision,
}

__all__ = ["Origin"]
