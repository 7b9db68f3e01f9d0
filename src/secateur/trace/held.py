"""What a model's modules hold besides parameters: ints, tensors, and the containers and configs they are in.

A tracing run replaces these for a while. `Snapshot` remembers every container that is reachable from the modules
and puts its contents back, whatever happened in between.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from secateur.trace.sizes import Key, Place

_SKIP = (
    str,
    bytes,
    float,
    complex,
    bool,
    type,
    enum.Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.Generator,
    torch.Size,
)
# What nn.Module keeps for itself: registries are handled by name, hooks and flags are not sizes.
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_OPAQUE_ROOTS = (
    "torch",
    "numpy",
    "builtins",
    "collections",
    "functools",
    "logging",
    "threading",
    "typing",
    "abc",
    "secateur",
)


def holder(obj: Any) -> dict[Any, Any] | list[Any] | None:
    """The mutable mapping or list behind an object, if it is one that we look into."""
    if isinstance(obj, dict | list):
        return obj
    if isinstance(obj, nn.Module):
        return obj.__dict__
    if obj is None or isinstance(obj, _SKIP):
        return None
    if type(obj).__module__.partition(".")[0] in _OPAQUE_ROOTS:
        return None
    return getattr(obj, "__dict__", None)


def _items(store: dict[Any, Any] | list[Any], of: Any) -> Iterator[tuple[Any, Any]]:
    """(path step, value) of each entry of a holder."""
    if isinstance(store, list):
        yield from enumerate(store)
    elif isinstance(of, dict):
        for key, value in list(store.items()):
            yield Key(key), value
    else:
        for name, value in list(store.items()):
            if not (isinstance(of, nn.Module) and (name in _REGISTRIES or name.endswith("_hooks"))):
                yield name, value


class Walk:
    """Visits every holder that is reachable from a model's modules, each once, and may replace what it holds."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: set[int] = set()
        self._keep: list[Any] = []  # objects whose ids were taken, so that ids stay theirs
        self.modules = dict(model.named_modules())

    def replace(self, change: Callable[[Any, Place], Any]) -> None:
        """Put `change(value, place)` in the place of every int and tensor."""
        for name, module in self.modules.items():
            self._visit(module, Place(name, ()), change)

    def _visit(self, obj: Any, place: Place, change: Callable[[Any, Place], Any]) -> None:
        store = holder(obj)
        if store is None or id(store) in self._seen or len(place.path) > 6:
            return
        self._seen.add(id(store))
        self._keep.append(store)
        for step, value in _items(store, obj):
            new = self._changed(value, Place(place.owner, (*place.path, step)), change)
            if new is not value:
                _put(store, step, new)

    def _changed(self, value: Any, place: Place, change: Callable[[Any, Place], Any]) -> Any:
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int | Tensor) and not isinstance(value, enum.Enum):
            return change(value, place)
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            parts = [self._changed(v, Place(place.owner, (*place.path, i)), change) for i, v in enumerate(value)]
            if all(a is b for a, b in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if not isinstance(value, nn.Module):
            self._visit(value, place, change)
        return value


def _put(store: Any, step: Any, value: Any) -> None:
    store[step.key if isinstance(step, Key) else step] = value


_NOTHING: Any = ()  # what most of a module's containers hold


class Snapshot:
    """The contents of every container reachable from a model's modules, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        self._saved: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for module in model.modules():
            self._save(module, 0)

    def _save(self, obj: Any, depth: int) -> None:
        if isinstance(obj, tuple):
            for value in obj:
                self._save(value, depth + 1)
            return
        store = obj if isinstance(obj, set | deque) else holder(obj)
        if store is None or id(store) in self._seen or depth > 8:
            return
        self._seen.add(id(store))
        self._saved.append((store, store.copy() if store else _NOTHING))
        if isinstance(store, dict | list):
            for value in store.values() if isinstance(store, dict) else store:
                if not isinstance(value, nn.Module):
                    self._save(value, depth + 1)

    def restore(self) -> None:
        """Put back every container's contents, touching only what differs."""
        for store, saved in self._saved:
            if saved is _NOTHING:
                store.clear()
            elif isinstance(store, dict):
                if len(store) != len(saved) or any(k not in store or store[k] is not v for k, v in saved.items()):
                    store.clear()
                    store.update(saved)
            elif isinstance(store, list):
                if len(store) != len(saved) or any(a is not b for a, b in zip(store, saved, strict=True)):
                    store[:] = saved
            elif store != saved:
                store.clear()
                (store.update if isinstance(store, set) else store.extend)(saved)


def read(model: nn.Module, place: Place) -> Any:
    """What a place holds now."""
    obj: Any = model.get_submodule(place.owner)
    for step in place.path:
        obj = _get(obj, step)
    return obj


def _get(obj: Any, step: Any) -> Any:
    if isinstance(step, Key):
        return obj[step.key]
    if isinstance(step, int):
        return obj[step]
    return obj.__dict__[step]


def write(model: nn.Module, place: Place, value: Any) -> None:
    """Make a place hold another value; tuples on the way are rebuilt."""
    _write(model.get_submodule(place.owner), place.path, value)


def _write(obj: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Set obj[path] = value; returns obj, or the new tuple in its place."""
    step, rest = path[0], path[1:]
    new = _write(_get(obj, step), rest, value) if rest else value
    if isinstance(obj, tuple):
        items = [new if i == step else item for i, item in enumerate(obj)]
        return type(obj)(*items) if hasattr(obj, "_fields") else tuple(items)
    store = holder(obj)
    if store is None:
        raise TypeError(f"{type(obj).__name__} cannot be written to")
    _put(store, step, new)
    return obj
