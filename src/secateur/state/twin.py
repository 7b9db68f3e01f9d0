"""A structural copy of a model that shares no container with it, to be run in its place.

Whatever a run does to a twin, the model does not know of: nothing has to be put back, and others may use the model.
"""

import copy
import operator
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from secateur.state.contents import alias
from secateur.state.held import (
    ATOMS,
    BARE,
    DEEPEST,
    Key,
    Place,
    Walk,
    emptied,
    every_module,
    holder,
    is_number,
    items,
    native,
    put,
    rebuilt,
    slots,
)
from secateur.state.leftovers import cleaned
from secateur.state.opaque import duplicate
from secateur.state.pointers import POINTERS, Redirection
from secateur.state.transaction import untouched

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Rewrite = Callable[[Any, Place, str], Any]
_LATE = (*POINTERS, set, frozenset, deque)  # what is filled when all that it may point at is there


class CannotCopyError(Exception):
    """No twin can be made of a model."""


class Run(Protocol[T_co]):
    """Something to be done with a model whose tensors and ints are others for a while."""

    @property
    def strayed(self) -> bool:
        """Whether it came upon tensors of the model that it was not given."""

    def change(self, value: Any, place: Place, kind: str) -> Any:
        """What takes the place of a tensor or an int; `kind` is parameter, buffer or attribute."""

    def carry_out(self, model: nn.Module) -> T_co:
        """Run the changed model."""


_LEADING_BACK: WeakSet[nn.Module] = WeakSet()  # models whose twins still use the model's own tensors


def run_apart(model: nn.Module, start: Callable[[], Run[T]], *, wholly: bool = False) -> T:
    """Do something with a twin of a model or, if that cannot be made or leads back to the model's own tensors (a
    function's closure may hold them), with the model itself, which is as it was afterwards.
    """
    if model not in _LEADING_BACK:
        run = start()
        try:
            with cleaned(model, wholly=wholly), twin(model, run.change) as other:
                found = run.carry_out(other)
            if not run.strayed:
                return found
        except CannotCopyError:
            pass
        except Exception:
            if not run.strayed:
                raise
        _LEADING_BACK.add(model)
    run = start()
    with cleaned(model, wholly=wholly), in_place(model, run.change):
        return run.carry_out(model)


@contextmanager
def twin(model: nn.Module, change: Rewrite) -> Iterator[nn.Module]:
    """A model like the given one, with `change(value, place, kind)` for every tensor and int that it holds.

    >>> net = nn.Linear(2, 3)
    >>> with twin(net, lambda value, place, kind: torch.zeros(1) if kind == "parameter" else value) as other:
    ...     other.weight, net.weight.shape
    (tensor([0.]), torch.Size([3, 2]))

    `kind` is parameter, buffer or attribute. What is one object in the model is one in the twin. Objects that are
    opaque (`held.holder`) are shared. At the end the twin is emptied, so that its tensors are gone at once.
    """
    making = _Making(change)
    try:
        try:
            made = making.model(model)
        except Exception as error:
            raise CannotCopyError(f"{type(error).__name__}: {error}") from error
        yield made
    finally:
        making.empty()


def copied(model: nn.Module, shares: Callable[[Tensor], bool]) -> nn.Module:
    """A copy of a model to keep; tensors are copied too, but for those whose memory it shares.

    >>> net = nn.Linear(2, 3)
    >>> other = copied(net, lambda tensor: tensor is net.weight)
    >>> [getattr(other, name).data_ptr() == getattr(net, name).data_ptr() for name in ("weight", "bias")]
    [True, False]
    >>> other.weight is net.weight, torch.equal(other.bias, net.bias)
    (False, True)
    """
    memo: dict[int, Any] = {}

    def new(tensor: Tensor) -> Tensor:
        if shares(tensor):
            return alias(tensor)
        return copy.deepcopy(tensor, memo) if tensor.is_leaf else tensor.detach().clone()

    return remade(model, new)


def remade(model: nn.Module, new: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model to keep, with other tensors, which share no container with the model's.

    >>> layer = nn.Linear(2, 3)
    >>> other = remade(nn.Sequential(layer, layer), torch.zeros_like)
    >>> other[0].weight is other[1].weight, other[0].bias
    (True, tensor([0., 0., 0.]))
    """
    made: dict[int, Tensor] = {}

    def change(value: Any, _place: Place, _kind: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        return made[id(value)] if id(value) in made else made.setdefault(id(value), new(value))

    return _Making(change).model(model)


@contextmanager
def in_place(model: nn.Module, change: Rewrite) -> Iterator[None]:
    """What `change` says in the model itself, for as long as the block runs: for what no twin can be made of."""
    with untouched(model):
        for name, module in model.named_modules():
            for registry, kind in (("_parameters", "parameter"), ("_buffers", "buffer")):
                for key, tensor in list(module.__dict__[registry].items()):
                    if tensor is not None:
                        put(module.__dict__[registry], Key(key), change(tensor, Place(name, (key,)), kind))
        Walk(model).replace(lambda value, place: change(value, place, "attribute"))
        yield


class _Making(Redirection):
    """One twin in the making."""

    shares = False

    def __init__(self, change: Rewrite) -> None:
        super().__init__()
        self._change = change
        self._made: list[Any] = []  # every new container
        self._later: list[tuple[Any, Any, Any]] = []  # container, step and original of what comes last

    def model(self, model: nn.Module) -> nn.Module:
        names = every_module(model)
        for module in names:
            self._new(module)
        for module, name in names.items():
            for registry, kind in (("_parameters", "parameter"), ("_buffers", "buffer")):
                registered = module.__dict__[registry]
                new = self._new(registered)
                for key, tensor in registered.items():
                    if tensor is not None:
                        tensor = self.remember(tensor, self._change(tensor, Place(name, (key,)), kind))
                    new[key] = tensor
        for module, name in names.items():
            self._attributes(module, Place(name, ()))
        while self._later:
            store, step, value = self._later.pop()
            put(store, step, self._copy(value, None))
        return self.memo[id(model)]

    def empty(self) -> None:
        for store in self._made:
            if type(store) not in BARE:
                native(store).clear(store)
            elif store:
                store.clear()
        self.memo.clear()

    def follow(self, value: Any) -> Any:
        return self._copy(value, None)

    def _new(self, original: Any) -> Any:
        """An empty object of the same class."""
        kind = type(original)
        new = self.remember(original, kind() if kind in BARE else emptied(original))
        if isinstance(new, dict | list | set | deque):
            self._made.append(new)
        if kind not in BARE and hasattr(new, "__dict__"):
            self._made.append(new.__dict__)
        return new

    def _attributes(self, module: nn.Module, place: Place | None) -> None:
        """What a module holds, in its order; registries and hooks are no places."""
        store, memo, made = self.memo[id(module)].__dict__, self.memo, self._made
        for name, value in module.__dict__.items():
            kind = type(value)
            if kind in ATOMS:
                store[name] = value
            elif kind in BARE and not value and id(value) not in memo:  # most are: hooks that nobody has set
                store[name] = memo[id(value)] = new = kind()
                self._originals.append(value)
                made.append(new)
            else:
                self._enter(store, name, value, None if name == "_modules" or name.endswith("_hooks") else place)

    def _enter(self, store: Any, step: Any, value: Any, place: Place | None) -> None:
        """Put the copy of a value into a new container; where it comes later, the value itself holds its place."""
        if not isinstance(value, Tensor) and id(value) in self.memo:
            value = self.memo[id(value)]
        elif isinstance(value, _LATE) or place is None:
            self._later.append((store, step, value))
        else:
            value = self._copy(value, place and place.at(step))
        put(store, step, value)

    def _copy(self, value: Any, place: Place | None) -> Any:
        if type(value) in ATOMS:
            return value
        if is_number(value) or isinstance(value, Tensor):
            return value if place is None else self._change(value, place, "attribute")
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return rebuilt(value, [self._copy(v, place and place.at(i)) for i, v in enumerate(value)])
        if isinstance(value, POINTERS):
            return self.pointer(value)
        if isinstance(value, set | frozenset | deque):
            return self._group(value)
        if (other := duplicate(value)) is not value:
            return self._numbers(self.remember(value, other))
        store = holder(value)
        if store is None and next(slots(value), None) is None:
            return value
        try:
            new = self._new(value)
        except TypeError:  # only its own code can make one
            return value
        if isinstance(value, nn.Module):  # one that is not registered: its attributes are no places
            self._attributes(value, None)
        else:
            self._fill(value, new, store, place if place is not None and len(place.path) <= DEEPEST else None)
        return new

    def _numbers(self, array: Any) -> Any:
        """A copy of an array, with copies of the objects in it, if those are what it holds."""
        for at in np.ndindex(array.shape) if isinstance(array, np.ndarray) and array.dtype.hasobject else ():
            array[at] = self._copy(array[at], None)
        return array

    def _fill(self, value: Any, new: Any, store: Any, place: Place | None) -> None:
        own = store or {}
        if isinstance(value, dict | list):
            if isinstance(value, list):
                list.extend(new, value)
            for step, each in items(store, value):
                at = Key(self.memo.get(id(step.key), step.key)) if isinstance(step, Key) else step
                self._enter(new, at, each, place)
            own, place = getattr(value, "__dict__", {}), None
        for name, each in own.items():
            self._enter(new.__dict__, name, each, place)
        for member, each in slots(value):
            member.__set__(new, self._copy(each, None))

    def _group(self, value: Any) -> Any:
        """A set or a queue."""
        if isinstance(value, deque):
            new = self._new(value)
            deque.__init__(new, [self._copy(each, None) for each in value], value.maxlen)
            return new
        parts = [self.memo.get(id(each), each) for each in value]
        if isinstance(value, frozenset):
            return type(value)(parts) if any(map(operator.is_not, parts, value)) else value
        new = self._new(value)
        set.update(new, parts)
        return new


__all__ = ["CannotCopyError", "Rewrite", "Run", "copied", "in_place", "remade", "run_apart", "twin"]
