"""What a model's modules hold besides parameters: ints, tensors, and the containers and configs they are in.

Containers are read and written by the methods of the built-in type that they are made from: a subclass may refuse.
"""

from __future__ import annotations

import contextlib
import enum
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.compat import version

ATOMS = frozenset({type(None), bool, str, float, bytes, complex, type, torch.dtype, torch.device, torch.Size})
_SKIP = (
    *(str, bytes, float, complex, bool, type, enum.Enum, torch.dtype, torch.device, torch.Generator, torch.Size),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
REGISTRIES = ("_parameters", "_buffers", "_modules")
_OPAQUE_ROOTS = frozenset(
    ("torch", "numpy", "builtins", "collections", "functools", "logging", "threading", "typing", "abc", "secateur")
)
BARE = frozenset((dict, OrderedDict, list, set))  # containers that are nothing more
DEEPEST = 6  # how long a path to a place may be
_NATIVE = frozenset((OrderedDict, defaultdict, dict, list, tuple, set, frozenset, deque, types.SimpleNamespace, object))


@dataclass(frozen=True)
class Place:
    """An int that an object reachable from the model holds: `path` leads there from the model.

    Path elements are attribute names (str), indices of lists and tuples (int) or keys of dicts, wrapped as `Key`.
    """

    owner: str
    path: tuple[Any, ...]

    def __str__(self) -> str:
        text = self.owner
        for step in self.path:
            text += f".{step}" if isinstance(step, str) else f"[{step}]"
        return text.lstrip(".")

    def at(self, step: Any) -> Place:
        """The place one step further on."""
        return Place(self.owner, (*self.path, step))


@dataclass(frozen=True)
class Key:
    """A key of a dict, on the path to a `Place`."""

    key: Any

    def __str__(self) -> str:
        return repr(self.key)


def native(obj: Any) -> Any:
    """The built-in type that an object's class is made from, whose methods no subclass has a say in.

    >>> class Frozen(dict):
    ...     def __setitem__(self, key, value):
    ...         raise TypeError
    >>> frozen = Frozen(a=1)
    >>> native(frozen).__setitem__(frozen, "a", 2)
    >>> frozen
    {'a': 2}
    """
    kind = type(obj)
    return kind if kind in _NATIVE else next(base for base in kind.__mro__ if base in _NATIVE)


def emptied(obj: Any) -> Any:
    """An object of the same class that holds nothing; a TypeError where only the class's own code can make one."""
    made = native(obj).__new__(type(obj))
    if isinstance(obj, defaultdict):
        made.default_factory = obj.default_factory
    return made


def holder(obj: Any) -> dict[Any, Any] | list[Any] | None:
    """The mutable mapping or list behind an object, if it is one that we look into."""
    if isinstance(obj, dict | list):
        return obj
    if isinstance(obj, nn.Module):
        return obj.__dict__
    if obj is None or isinstance(obj, _SKIP) or type(obj).__module__.partition(".")[0] in _OPAQUE_ROOTS:
        return None
    found = getattr(obj, "__dict__", None)
    return found if type(found) is dict else None


def slots(obj: Any) -> Iterator[tuple[Any, Any]]:
    """(descriptor, value) of what an object holds in `__slots__`, if it is one that we look into."""
    for kind in type(obj).__mro__[:-1]:
        if "__slots__" in vars(kind) and kind.__module__.partition(".")[0] not in _OPAQUE_ROOTS:
            for member in vars(kind).values():
                if isinstance(member, types.MemberDescriptorType):
                    with contextlib.suppress(AttributeError):  # not set
                        yield member, member.__get__(obj)


def items(store: dict[Any, Any] | list[Any], of: Any) -> Iterator[tuple[Any, Any]]:
    """(path step, value) of each entry of a holder; without registries and hooks, which nn.Module keeps for itself."""
    if isinstance(store, list):
        yield from enumerate(list.__iter__(store))
    elif isinstance(of, dict):
        for key, value in list(native(store).items(store)):
            yield Key(key), value
    else:
        for name, value in list(store.items()):
            if not (isinstance(of, nn.Module) and (name in REGISTRIES or name.endswith("_hooks"))):
                yield name, value


def is_number(value: Any) -> bool:
    """Whether a value is a whole number: no truth value and no name."""
    return isinstance(value, int) and not isinstance(value, bool | enum.Enum)


def every_module(model: nn.Module) -> dict[nn.Module, str]:
    """The modules of a model, each with its name, as `model.named_modules()` has them; the deeper, the slower that is.

    >>> net = nn.Sequential(nn.Sequential(nn.ReLU()), nn.Tanh())
    >>> every_module(net) == {module: name for name, module in net.named_modules()}
    True
    """
    found: dict[nn.Module, str] = {}
    todo: list[tuple[nn.Module | None, str]] = [(model, "")]
    while todo:
        module, name = todo.pop()
        if module is not None and module not in found:
            found[module] = name
            if module._modules:
                start = f"{name}." if name else ""
                todo += [(part, start + key) for key, part in reversed(module._modules.items())]
    return found


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer under each of its names, tied ones too."""
    for name, module in model.named_modules():
        for registered in (module._parameters, module._buffers):
            for key, tensor in registered.items():
                if tensor is not None:
                    yield f"{name}.{key}".lstrip("."), tensor


class Walk:
    """Visits every holder that is reachable from a model's modules, each once, and may replace what it holds."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: set[int] = set()
        self._keep: list[Any] = []  # objects whose ids were taken, so that ids stay theirs
        self.modules = dict(model.named_modules())

    def replace(self, change: Callable[[Any, Place], Any], among: Collection[str] | None = None) -> None:
        """Put `change(value, place)` in the place of every int and tensor; `among`: in these modules only."""
        for name, module in self.modules.items():
            if among is None or name in among:
                self._visit(module, Place(name, ()), change)

    def _visit(self, obj: Any, place: Place, change: Callable[[Any, Place], Any]) -> None:
        store = holder(obj)
        if store is None or id(store) in self._seen or len(place.path) > DEEPEST:
            return
        self._seen.add(id(store))
        self._keep.append(store)
        for step, value in items(store, obj):
            new = self._changed(value, place.at(step), change)
            if new is not value:
                put(store, step, new)

    def _changed(self, value: Any, place: Place, change: Callable[[Any, Place], Any]) -> Any:
        if is_number(value) or isinstance(value, Tensor):
            return change(value, place)
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return rebuilt(value, [self._changed(v, place.at(i), change) for i, v in enumerate(value)])
        if not isinstance(value, nn.Module):
            self._visit(value, place, change)
        return value


def rebuilt(value: tuple[Any, ...], parts: list[Any]) -> Any:
    """A tuple of the same class with other parts; itself, if they are the same."""
    if all(a is b for a, b in zip(parts, value, strict=True)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def put(store: Any, step: Any, value: Any) -> None:
    """Make an entry of a holder another."""
    if type(store) is dict and not isinstance(step, Key):
        store[step] = value
        return
    native(store).__setitem__(store, step.key if isinstance(step, Key) else step, value)


def read(model: nn.Module, place: Place) -> Any:
    """What a place holds now."""
    return within(model.get_submodule(place.owner), place)


def within(module: nn.Module, place: Place) -> Any:
    """What a place in some module holds now."""
    obj: Any = module
    for step in place.path:
        obj = _get(obj, step)
    return obj


def _get(obj: Any, step: Any) -> Any:
    if isinstance(step, str):
        return obj.__dict__[step]
    return native(obj).__getitem__(obj, step.key if isinstance(step, Key) else step)


def write(model: nn.Module, place: Place, value: Any) -> None:
    """Make a place hold another value; tuples on the way are rebuilt."""
    _write(model.get_submodule(place.owner), place.path, value)


def _write(obj: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Set obj[path] = value; returns obj, or the new tuple in its place."""
    step, rest = path[0], path[1:]
    new = _write(_get(obj, step), rest, value) if rest else value
    if isinstance(obj, tuple):
        return rebuilt(obj, [new if i == step else item for i, item in enumerate(obj)])
    store = holder(obj)
    if store is None:
        raise TypeError(f"{type(obj).__name__} cannot be written to")
    put(store, step, new)
    return obj


def signature(modules: Iterable[nn.Module]) -> list[Any]:
    """What tells whether a call has left something in a model: what its modules hold, and what that holds."""
    seen: list[Any] = []
    for module in modules:
        for name, value in module.__dict__.items():
            if type(value) in ATOMS or name == "training" or name.endswith("_hooks"):
                continue
            seen.append(id(value))
            store = value if isinstance(value, dict | list | set | deque) else getattr(value, "__dict__", ())
            if store:
                inside = store.values() if isinstance(store, dict) else store
                seen += [(id(each), version(each)) for each in inside]
    return seen
