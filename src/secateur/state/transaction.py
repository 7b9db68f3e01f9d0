"""All or nothing: a model, an optimizer or any other owner of state, as it was before something went wrong."""

from __future__ import annotations

import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from secateur.errors import SecateurWarning
from secateur.state.chances import same_chances
from secateur.state.contents import put_contents
from secateur.state.held import ATOMS, BARE, REGISTRIES, holder, native, slots
from secateur.state.opaque import duplicate, restore

_NOTHING: Any = ()  # what most of a module's containers hold


@contextmanager
def transaction(*owners: object) -> Iterator[Transaction]:
    """If the block raises anything, all that the owners hold is as before: the same objects with the same contents.

    >>> layer = nn.Linear(2, 2)
    >>> with transaction(layer):
    ...     layer.bias = None
    ...     raise MemoryError
    Traceback (most recent call last):
    MemoryError
    >>> layer.bias is None
    False

    Tensors get back their storage, gradient and flags; their values only if they were kept before they were written.
    """
    made = Transaction(*owners)
    try:
        yield made
    except BaseException:
        made.roll_back()
        raise


@contextmanager
def untouched(*owners: object) -> Iterator[Transaction]:
    """Whatever happens inside, all that the owners hold, and the random state, are as before afterwards."""
    made = Transaction(*owners)
    with same_chances():
        try:
            yield made
        finally:
            made.roll_back()


class Transaction:
    """Everything that is reachable from some owners, as it is now, to go back to as often as one likes.

    >>> net = nn.Linear(2, 2)
    >>> moment, weight = Transaction(net), net.weight
    >>> net.weight = nn.Parameter(torch.zeros(1, 2))
    >>> moment.roll_back()
    >>> net.weight is weight
    True
    """

    def __init__(self, *owners: object) -> None:
        self._contents: list[tuple[Any, Any]] = []  # a container and a copy of it
        self._slots: list[tuple[Any, Any, Any]] = []
        self._opaque: list[tuple[Any, Any]] = []  # an object with contents of its own and a copy of it
        self._classes: list[tuple[Any, type]] = []
        self._members: list[tuple[type, dict[str, Any]]] = []
        self._tensors: list[tuple[Tensor, Tensor, bool, Tensor | None]] = []
        self._values: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        self._callbacks: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        modules = [module for owner in owners if isinstance(owner, nn.Module) for module in owner.modules()]
        self._save(module.__dict__[name] for module in modules for name in REGISTRIES)  # what matters most comes first
        self._save(modules)
        self._save((vars(owner) for owner in owners if owner is not None), modules=False)
        self._classes += [(owner, type(owner)) for owner in owners if owner is not None]

    # saving ----------------------------------------------------------------------------------------------

    def keep(self, *tensors: Tensor, again: Callable[[], Tensor] | None = None) -> None:
        """Remember the values of tensors, and of their gradients, that may be written; or how to make them again."""
        for tensor in tensors:
            if id(tensor) not in self._values:
                self._values[id(tensor)] = tensor, again or _constant(tensor.detach().clone())
                if again is None and tensor.is_leaf and tensor.grad is not None:
                    self.keep(tensor.grad)

    def keep_all(self) -> None:
        """Remember the values of every tensor."""
        self.keep(*(tensor for tensor, *_ in self._tensors))

    def before_roll_back(self, callback: Callable[[], object]) -> None:
        """Call something first when all is put back; it may fail."""
        self._callbacks.append(callback)

    def _save(self, found: Iterable[Any], *, modules: bool = True) -> None:
        stack = list(found)[::-1]
        seen, contents = self._seen, self._contents
        while stack:
            obj = stack.pop()
            kind = type(obj)
            if kind in ATOMS or kind is int or id(obj) in seen:
                continue
            if kind is tuple:
                stack += obj
                continue
            if isinstance(obj, nn.Module) and not modules:
                continue
            seen.add(id(obj))
            if kind in BARE:
                contents.append((obj, copy_of(obj)))
                stack += obj.values() if isinstance(obj, dict) else obj
            else:
                stack += self._inside(obj)

    def _inside(self, obj: Any) -> list[Any]:
        """Save what an object holds; what of it may hold more."""
        if isinstance(obj, Tensor):
            self._tensor(obj)
            return []
        if isinstance(obj, nn.Module):
            self._classes.append((obj, type(obj)))
            if is_parametrized(obj):  # it has a class of its own, in which each parametrized tensor is a property
                self._members.append((type(obj), dict(vars(type(obj)))))
            return [obj.__dict__]
        if isinstance(obj, tuple):
            return list(obj)
        if (other := duplicate(obj)) is not obj:
            self._opaque.append((obj, other))
            return list(other.flat) if isinstance(obj, np.ndarray) and obj.dtype.hasobject else []
        held = list(slots(obj))
        self._slots += [(obj, member, value) for member, value in held]
        inside = [value for _, value in held]
        store = obj if isinstance(obj, set | deque) else holder(obj)
        if store is not None and store is not obj:
            return [*inside, store]
        if store is not None:
            self._contents.append((store, copy_of(store)))
            inside += native(store).values(store) if isinstance(store, dict) else native(store).__iter__(store)
            inside += [obj.__dict__] if hasattr(obj, "__dict__") else []
        return inside

    def _tensor(self, tensor: Tensor) -> None:
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None:  # comes first, so that it fits when its tensor is put back
            self._tensor(grad)
        with suppress(RuntimeError, NotImplementedError):  # one without memory of its own
            self._tensors.append((tensor, tensor.data, tensor.requires_grad, grad))

    def holds(self) -> bool:
        """Whether all is as it was, but for the values of tensors."""
        return (
            all(is_back(*what) for what in self._contents)
            and all(getattr(obj, member.__name__, _NOTHING) is value for obj, member, value in self._slots)
            and all(type(obj) is kind for obj, kind in self._classes)
            and all(dict(vars(kind)) == before for kind, before in self._members)
            and all(_same_memory(own, data) and own.requires_grad == learns for own, data, learns, _ in self._tensors)
        )

    # putting back ----------------------------------------------------------------------------------------

    def roll_back(self) -> None:
        """All as it was; a warning names what cannot be put back."""
        for callback in self._callbacks:
            with suppress(Exception):  # the user's code; what it holds is put back below
                callback()
        lost = []
        for put, saved in (
            (put_back, self._contents),
            (_put_slot, self._slots),
            (restore, self._opaque),
            (_put_class, self._classes),
            (_put_members, self._members),
            (_put_tensor, self._tensors),
            (_put_value, list(self._values.values())),
        ):
            for what in saved:
                try:
                    put(*what)
                except Exception as error:
                    lost.append(f"a {type(what[0]).__name__} ({type(error).__name__}: {error})")
        if lost:
            warnings.warn(f"{len(lost)} things could not be put back: {'; '.join(lost[:3])}", SecateurWarning, 2)


def _constant(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value


def copy_of(store: Any) -> Any:
    """What a container holds, to be put back."""
    if not len(store):
        return _NOTHING
    return dict(native(store).items(store)) if isinstance(store, dict) else list(native(store).__iter__(store))


def put_back(store: Any, saved: Any) -> None:
    """Make the contents of a container what they were, in their order, touching only one that differs."""
    if is_back(store, saved):
        return
    base = native(store)
    if isinstance(store, list):
        list.__setitem__(store, slice(None), saved)
        return
    base.clear(store)
    if isinstance(store, dict):
        for key, value in dict(saved).items():
            base.__setitem__(store, key, value)
    else:
        (set.update if isinstance(store, set) else deque.extend)(store, saved)


def is_back(store: Any, saved: Any) -> bool:
    """Whether a container holds what it did, in the same order."""
    if saved is _NOTHING:
        return not len(store)
    if isinstance(store, dict):
        base = native(store)
        return _same(base.keys(store), saved.keys()) and _same(base.values(store), saved.values())
    return _same(store, saved)


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _put_slot(obj: Any, member: Any, value: Any) -> None:
    member.__set__(obj, value)


def _put_class(obj: Any, kind: type) -> None:
    if type(obj) is not kind:
        object.__setattr__(obj, "__class__", kind)


def _put_members(kind: type, before: dict[str, Any]) -> None:
    for name in vars(kind).keys() - before.keys():
        delattr(kind, name)
    for name, value in before.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


def _put_tensor(tensor: Tensor, data: Tensor, learns: bool, grad: Tensor | None) -> None:
    if not _same_memory(tensor, data):
        put_contents(tensor, data)
    if tensor.requires_grad != learns:
        tensor.requires_grad_(learns)
    if tensor.is_leaf and tensor.grad is not grad:
        tensor.grad = grad


def _same_memory(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout):
        return False
    return a.layout is not torch.strided or (a.data_ptr(), a.stride()) == (b.data_ptr(), b.stride())


@torch.no_grad()
def _put_value(tensor: Tensor, value: Callable[[], Tensor]) -> None:
    before = value()
    try:
        tensor.data.copy_(before)
    except RuntimeError:  # several positions in one place of memory, or made for inference and never to be written
        if not torch.equal(tensor, before):
            tensor.data = before.clone()


__all__ = ["Transaction", "copy_of", "is_back", "put_back", "transaction", "untouched"]
