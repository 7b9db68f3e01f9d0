"""Branches of the user's code that take tensors apart, and that no run has taken.

While the model runs, each call of a torch function tells where the code around it is, and a branch within which no such
place lies was not taken. It may then be taken by force, if it does nothing but compute; what is not, is said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from secateur.state.leftovers import of_ours
from secateur.tracing.forced import Forced
from secateur.tracing.questions import Branch, branches
from secateur.tracing.stated import coded, is_users, named, words

_MOST_READ = 1024  # classes whose functions are remembered
_INSTALLED = "site-packages"
_CALLED = ("forward", "__call__")

Reached = tuple[str, int, int, int]  # a place in code: its file, the first line of its function, a line and a column
Branching = dict[FunctionType, tuple[Branch, ...]]


def branching(model: nn.Module, *roots: str) -> Branching:
    """The functions of the user's that have such branches, of those that some methods call as far as names tell.

    These are those of modules that have a name of the `roots`; by default what runs when a model is called.
    """
    kinds = [kind for kind in coded(model) if is_users(kind)]
    found: dict[FunctionType, type] = {}
    for kind in kinds:
        for function, owner in _of_class(kind, roots or _CALLED):
            found.setdefault(function, owner)
    for module in model.modules() if kinds else ():
        held = [value for value in vars(module).values() if callable(value) and not isinstance(value, nn.Module)]
        for function in _named((*held, *module._forward_hooks.values(), *module._forward_pre_hooks.values())):
            found.setdefault(function, object)
    every = (
        (function, branches(function, kind)) for function, kind in found.items() if function.__name__ != "__init__"
    )
    return {function: own for function, own in every if own}


@lru_cache(_MOST_READ)
def _of_class(kind: type, roots: tuple[str, ...]) -> tuple[tuple[FunctionType, type], ...]:
    """What some methods call by name, and what that calls: methods, with their class, and functions.

    Of classes that are no modules, it may be any method.
    """
    own: dict[str, list[FunctionType]] = {}
    for base in filter(is_users, kind.__mro__):
        for name, item in vars(base).items():
            own.setdefault(name, []).extend(_functions(item))
    todo = [*roots] if issubclass(kind, nn.Module) else [*own]
    methods: dict[FunctionType, None] = {}
    while todo:
        for function in own.pop(todo.pop(), ()):
            methods[function] = None
            names = words(function.__code__)
            todo += [*own] if "getattr" in names else names
    return (*((f, kind) for f in methods), *((f, object) for f in _named(methods) if f not in methods))


def _named(items: Iterable[Any]) -> list[FunctionType]:
    """Functions of the user's, and those that they name or close over."""
    found: dict[FunctionType, None] = {}
    todo = [function for item in items for function in _functions(item)]
    while todo:
        function = todo.pop()
        if function not in found and _is_users(function):
            found[function] = None
            names = words(function.__code__)
            known = [one for one in (named(function, name) for name in names) if one is not None]
            homes = (one for one in known if isinstance(one, ModuleType | type) and not of_ours(_home(one)))
            inside = (vars(one).get(name) for one in homes for name in names)
            todo += (each for item in (*known, *inside) for each in _functions(item))
    return list(found)


def _home(item: ModuleType | type) -> str:
    return item.__name__ if isinstance(item, ModuleType) else item.__module__


def _is_users(function: FunctionType) -> bool:
    home = (function.__module__ or "").partition(".")[0]
    return not (of_ours(home) or home in sys.stdlib_module_names or _INSTALLED in function.__code__.co_filename)


def _functions(item: Any) -> Iterator[FunctionType]:
    """The functions that something is: itself, what it is wrapped around, or what is behind it."""
    while item is not None:
        if isinstance(item, FunctionType):
            yield item
        item = _BEHIND.get(type(item), lambda _: None)(item)


_BEHIND: dict[type, Callable[[Any], Any]] = {
    FunctionType: lambda item: item.__dict__.get("__wrapped__"),
    MethodType: lambda item: item.__func__,
    classmethod: lambda item: item.__func__,
    partial: lambda item: item.func,
    property: lambda item: item.fget,
    staticmethod: lambda item: item.__func__,
}


def places(code: CodeType, at: Iterable[int]) -> Iterator[Reached]:
    """Where some instructions of code are, in the source."""
    every = [*code.co_positions()]
    for each in at:
        line, _, column, _ = every[each // 2]  # one for every two bytes
        if line is not None and column is not None:
            yield code.co_filename, code.co_firstlineno, line, column


def untaken(
    every: Branching, reached: Collection[Reached], tried: Collection[Forced] = ()
) -> Iterator[tuple[Forced, bool]]:
    """The outermost of those branches that were not `reached`, and whether some of the code around them was.

    What was `tried` is passed over, and so what is within it comes next.
    """
    for function, own in every.items():
        home = function.__code__.co_filename, function.__code__.co_firstlineno
        ran = [place for place in reached if place[:2] == home]
        left = [Forced(function, branch) for branch in own if not any(_within(place, branch) for place in ran)]
        left = [one for one in left if one not in tried]
        for one in left:
            if not any(_inside(one.branch, other.branch) for other in left):
                yield one, bool(ran)


def within(every: Branching, one: Forced) -> list[Forced]:
    """A branch, and those within it."""
    inner = (branch for branch in every.get(one.function, ()) if _inside(branch, one.branch))
    return [one, *(Forced(one.function, branch) for branch in inner)]


def line_of_branch(one: Forced) -> str:
    """File and line."""
    return f"{Path(one.function.__code__.co_filename).name}:{one.branch.line}"


def _within(place: Reached, branch: Branch) -> bool:
    return branch.span[0] <= place[2:] < branch.span[1]


def _inside(branch: Branch, other: Branch) -> bool:
    return branch.span != other.span and other.span[0] <= branch.span[0] and branch.span[1] <= other.span[1]


__all__ = ["Branching", "Reached", "branching", "line_of_branch", "places", "untaken", "within"]
