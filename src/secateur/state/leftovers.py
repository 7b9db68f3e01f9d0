"""What a run leaves behind outside of the model: caches of its code that hold what was made for the run."""

import functools
import gc
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from secateur.compat import global_hooks
from secateur.errors import SecateurWarning
from secateur.state.held import ATOMS, BARE, every_module, holder, native
from secateur.state.transaction import copy_of, is_back, put_back

CACHED = type(functools.cache(lambda: None))
_SKIPPED = ("torch", "builtins", "typing", "abc", "secateur")
_FUNCTIONS = (functools.partial, types.MethodType, types.FunctionType)
_DEEPEST = 3  # how far inside of a module-level container a run's leftovers are looked for
_ASKED_ABOUT, _HIGHEST = 16, 5  # how many objects' holders are asked for at a time, and how far up


def classes(model: nn.Module) -> dict[type, None]:
    """The classes that a model's modules are made of, but torch's own."""
    kinds = dict.fromkeys(kind for own in dict.fromkeys(map(type, every_module(model))) for kind in own.__mro__)
    return {kind: None for kind in kinds if kind.__module__.partition(".")[0] not in _SKIPPED}


@contextmanager
def cleaned(model: nn.Module, *, wholly: bool = False) -> Iterator[None]:
    """Afterwards no variable, class attribute or container of the model's code holds a tensor made meanwhile.

    `wholly`: nor anything else that it did not hold before, such as a plain number. What the model's hooks write to is
    always as it was, and so are the hooks of all modules.
    """
    hooks = [(each, dict(each)) for each in global_hooks()]
    variables = list(_of_hooks(model))
    written: dict[int, tuple[Any, Any]] = {}
    for _, _, value in variables:
        _save(written, (value,), (value,))
    saved: dict[int, tuple[Any, Any]] = {}
    for kind in classes(model):
        _save(saved, kind, vars(kind))
        if kind.__module__ in sys.modules:
            _save(saved, sys.modules[kind.__module__], vars(sys.modules[kind.__module__]))
    try:
        yield
    finally:
        for each, before in hooks:
            put_back(each, before)
        for owner, name, value in variables:
            _put_variable(owner, name, value)
        for store, before in written.values():
            if not isinstance(store, tuple):
                put_back(store, before)
        for store, before in saved.values():
            if isinstance(store, type | types.ModuleType):
                _put_attributes(store, before)
            elif not is_back(store, before) and (wholly or _foreign_in(store, before)):
                put_back(store, before)


def _of_hooks(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """The variables that functions which hang on a model's modules have besides their own: (holder, name, value)."""
    every = (item for module in every_module(model) for item in module.__dict__.items())
    held = [(name, one) for name, one in every if type(one) not in ATOMS and (type(one) not in BARE or one)]
    stack: list[Any] = [hook for _, hook in held if isinstance(hook, _FUNCTIONS)]
    stack += [
        hook for name, hooks in held if name.endswith("_hooks") and isinstance(hooks, dict) for hook in hooks.values()
    ]
    seen: set[int] = set()
    while stack:
        hook = stack.pop()
        hook = hook.func if isinstance(hook, functools.partial) else hook
        hook = hook.__func__ if isinstance(hook, types.MethodType) else hook
        if not isinstance(hook, types.FunctionType) or id(hook) in seen or of_ours(hook.__module__):
            continue
        seen.add(id(hook))
        names = (name for name in _names(hook.__code__) if name in hook.__globals__)
        variables: list[tuple[Any, str]] = [(hook.__globals__, name) for name in names]
        for owner, name in (*variables, *((cell, "cell_contents") for cell in hook.__closure__ or ())):
            with suppress(ValueError):  # an empty cell
                value = owner[name] if isinstance(owner, dict) else owner.cell_contents
                yield owner, name, value
                if not isinstance(value, types.FunctionType) or value.__globals__ is hook.__globals__:
                    stack.append(value)


def of_ours(module: str | None) -> bool:
    """Whether a Python module is torch's, Python's or this library's."""
    return (module or "").partition(".")[0] in _SKIPPED


def _names(code: types.CodeType) -> Iterator[str]:
    """The global variables, among others, that some code names."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _put_variable(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif owner.get(name) is not value:
        owner[name] = value


def _save(saved: dict[int, tuple[Any, Any]], owner: Any, store: Any, depth: int = 0) -> None:
    """Save what is behind an owner, and the containers and objects inside of it, as far as they are plain."""
    if id(owner) in saved:
        return
    before = copy_of(store) if depth else store if isinstance(store, tuple) else dict(store)
    saved[id(owner)] = owner, before
    for value in before.values() if isinstance(before, dict) else before:
        if type(value) not in ATOMS and not isinstance(value, types.ModuleType | nn.Module) and depth < _DEEPEST:
            inside = value if isinstance(value, set | deque) else holder(value)
            if inside is not None:
                _save(saved, inside, inside, depth + 1)


def _put_attributes(owner: Any, before: Mapping[str, Any]) -> None:
    for name, value in list(vars(owner).items()):
        if value is not before.get(name) and foreign(value):
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def _foreign_in(store: Any, before: Any) -> bool:
    """Whether a container has something that it did not have and that is not the user's own."""
    if isinstance(store, dict):
        old = dict(before)
        new = ((k, v) for k, v in native(store).items(store) if k not in old or old[k] is not v)
        return any(foreign(k) or foreign(v) for k, v in new)
    known = set(map(id, before))
    return any(id(value) not in known and foreign(value) for value in store)


def foreign(value: Any, depth: int = 0) -> bool:
    """Whether something holds a tensor, something of this library's, or what is left of a module made for a run."""
    if type(value) in ATOMS or type(value) is int or isinstance(value, type | types.ModuleType) or depth > _DEEPEST:
        return False
    if isinstance(value, Tensor) or type(value).__module__.partition(".")[0] == "secateur":
        return True
    if isinstance(value, nn.Module):
        return not value.__dict__
    store = value if isinstance(value, tuple | set | deque) else holder(value)
    if isinstance(store, dict):
        return any(foreign(k, depth + 1) or foreign(v, depth + 1) for k, v in native(store).items(store))
    return store is not None and any(foreign(each, depth + 1) for each in store)


def let_go(made: list[weakref.ref[Any]]) -> None:
    """Take what a run made from those who still hold it: caches of functions, containers in other Python modules.

    Asking who holds an object means looking at all objects there are, so few are asked about at a time; what one
    container held is gone together, and what nobody can be asked for (a frame that a debugger keeps) is left.
    """
    if all(one() is None for one in made):
        return
    gc.collect()
    left = len(made) + 1
    while left > (left := sum(one() is not None for one in made)) > 0:
        _take_from_holders([held for one in made if (held := one()) is not None][:_ASKED_ABOUT])


def _take_from_holders(level: list[Any]) -> None:
    """Go up from objects to who holds them, and to who holds those."""
    seen = {id(level), *map(id, level)}
    for _ in range(_HIGHEST):
        above = [each for each in gc.get_referrers(*level) if id(each) not in seen]
        seen.update(map(id, (above, *above)))
        level = [each for each in above if not _taken_from(each, seen) and _passes_on(each)][:_ASKED_ABOUT]
        seen.add(id(level))
        if not level:
            return


def _passes_on(holder: Any) -> bool:
    """Whether what a holder is in holds what it holds: of plain containers, and of what is made while tracing."""
    plain = (dict, list, tuple, set, frozenset, deque, Tensor)
    return isinstance(holder, plain) or type(holder).__module__.partition(".")[0] in ("secateur", "functools")


def _taken_from(holder: Any, seen: set[int]) -> bool:
    """Whether a holder is one that things can be taken from: a cache, or variables of a module, class or closure."""
    if isinstance(holder, CACHED):
        holder.cache_clear()
        return True
    variables: Mapping[str, Any] | None = None
    if isinstance(holder, types.CellType):
        variables = {"cell_contents": holder.cell_contents}
    elif isinstance(holder, type):
        variables = vars(holder)
    elif type(holder) is dict and isinstance(holder.get("__name__"), str):
        module = sys.modules.get(holder["__name__"])
        variables = holder if getattr(module, "__dict__", None) is holder else None
    for name, value in list((variables or {}).items()):
        if id(value) in seen:
            _purge(name, value, seen)
    return variables is not None


def _purge(name: str, store: Any, seen: set[int]) -> None:
    if isinstance(store, dict):
        for key, value in list(native(store).items(store)):
            if id(key) in seen or id(value) in seen:
                native(store).__delitem__(store, key)
    elif isinstance(store, list | set | deque):
        put_back(store, [each for each in store if id(each) not in seen])
    elif isinstance(store, Tensor) and name != "cell_contents":  # a cell may be of a frame that is on its way out
        warnings.warn(f"{name} holds a {type(store).__name__} that was made while tracing", SecateurWarning, 2)


__all__ = ["CACHED", "classes", "cleaned", "let_go", "of_ours"]
