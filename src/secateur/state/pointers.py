"""What points at objects without holding them (functions, methods, partials, weak references), made to point at others.

A copy of some objects is no good as long as a closure or a bound method beside it still leads to the originals.
"""

import operator
import types
import weakref
from functools import partial
from typing import Any

import torch

from secateur.state.held import rebuilt

POINTERS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, partial, weakref.ref)


class Redirection:
    """Which objects take the place of which.

    >>> old, new = {"width": 4}, {"width": 2}
    >>> redirection = Redirection()
    >>> _ = redirection.remember(old, new)
    >>> redirection.pointed(old.get)("width"), redirection.pointed([partial(old.get, "width")])[0]()
    (2, 2)
    """

    shares = True  # whether a partial that leads to none of the old objects stays what it is: it could be written to

    def __init__(self) -> None:
        self.memo: dict[int, Any] = {}  # by the id of the original
        self._originals: list[Any] = []  # which keeps ids theirs

    def remember(self, original: Any, new: Any) -> Any:
        """Let one object take the place of another from now on."""
        self.memo[id(original)] = new
        self._originals.append(original)
        return new

    def follow(self, value: Any) -> Any:
        """What takes the place of something that a method or a partial is made of."""
        return self.pointed(value)

    def pointed(self, value: Any) -> Any:
        """A value that leads to the new objects, also from plain containers; itself where it led to none of the old."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, POINTERS):
            return self.pointer(value)
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return rebuilt(value, [self.pointed(each) for each in value])
        if type(value) not in (dict, list):
            return value
        self.remember(value, value)
        old = list(value.values() if isinstance(value, dict) else value)
        parts = [self.pointed(each) for each in old]
        if not any(map(operator.is_not, parts, old)):
            return value
        return self.remember(value, dict(zip(value, parts, strict=True)) if isinstance(value, dict) else parts)

    def pointer(self, value: Any) -> Any:
        """A function, method, partial or weak reference that points at the new objects."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, partial):
            given = (value.func, value.args, *value.keywords.values())
            func, args, *others = made = tuple(map(self.follow, given))
            same = self.shares and all(map(operator.is_, made, given))
            return value if same else type(value)(func, *args, **dict(zip(value.keywords, others, strict=True)))
        if isinstance(value, weakref.ref):
            new = self.pointed(target := value())
            plain = type(value) is weakref.ref  # others, such as WeakMethod, know more than what they point at
            return weakref.ref(new, value.__callback__) if plain and new is not target else value
        owner = value.__self__
        bound = isinstance(value, types.MethodType)
        new = self.follow(owner) if bound else self.pointed(owner)
        if new is owner:
            return value
        return types.MethodType(self.follow(value.__func__), new) if bound else getattr(new, value.__name__)

    def _function(self, value: types.FunctionType) -> Any:
        """A function whose closure and defaults point at the new objects; what else they hold, it shares."""
        held = {
            "closure": tuple(map(_contents, value.__closure__ or ())),
            "defaults": value.__defaults__ or (),
            "keywords": value.__kwdefaults__ or {},
            "attributes": value.__dict__,
        }
        self.remember(value, value)
        new = {part: self.pointed(contents) for part, contents in held.items()}
        if all(new[part] is contents for part, contents in held.items()):
            return value
        closure = tuple(types.CellType(*contents) for contents in new["closure"])
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, new["defaults"] or None, closure)
        made.__kwdefaults__ = new["keywords"] or None
        made.__dict__.update(new["attributes"])
        return self.remember(value, made)


def _contents(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty
        return ()


__all__ = ["POINTERS", "Redirection"]
