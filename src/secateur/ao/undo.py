"""All or nothing: what a failed change leaves behind is what was there before."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized


@contextmanager
def all_or_nothing(*owners: object, contents: Iterable[Tensor] = ()) -> Iterator[None]:
    """
    >>> layer = nn.Linear(2, 2)
    >>> try:
    ...     with all_or_nothing(layer):
    ...         layer.bias = None
    ...         raise ValueError
    ... except ValueError:
    ...     print(layer.bias is None)
    False

    If the block raises, the owners get back their class and attributes (a module, those of everything inside
    it, and its parameters and buffers their storage), and the tensors in `contents` their values.
    """
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    objects = [*owners, *chain.from_iterable(module.modules() for module in modules)]
    classes = [(each, each.__class__) for each in objects]
    # A parametrized module has a class of its own, in which each parametrized tensor is a property.
    members = [(module.__class__, dict(vars(module.__class__))) for module in _parametrized(modules)]
    containers = [(held, copy.copy(held)) for each in objects for held in _containers(vars(each), depth=3)]
    tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    storages = [(tensor, tensor.data) for tensor in tensors]
    values = [(tensor, tensor.data, tensor.detach().clone()) for tensor in contents]
    try:
        yield
    except BaseException:
        for each, kind in classes:
            each.__class__ = kind
        for kind, before in members:
            _restore_members(kind, before)
        for held, before in containers:
            held.clear()
            held.update(before) if isinstance(held, dict) else held.extend(before)
        for tensor, data in storages:
            tensor.data = data
        for tensor, data, value in values:
            tensor.data = data
            tensor.data.copy_(value)
        raise


def _parametrized(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    return (inner for module in modules for inner in module.modules() if is_parametrized(inner))


def _restore_members(kind: type, before: dict[str, Any]) -> None:
    for name in vars(kind).keys() - before.keys():
        delattr(kind, name)
    for name in before.keys() - vars(kind).keys():
        setattr(kind, name, before[name])


def _containers(value: Any, depth: int) -> Iterator[Any]:
    """The dict or list `value` and those inside it, down to `depth`."""
    if depth > 0 and isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item, depth - 1)
