"""Copies of plain objects that a model may share with others (a config, a table), for it alone to write to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from secateur.state.held import REGISTRIES, Place, emptied, holder, native, read, slots
from secateur.state.pointers import Redirection


def own_what_is_written(model: nn.Module, places: Iterable[Place]) -> None:
    """Give a model copies of its own of the plain objects on the way to some places, and of what leads to these.

    >>> class Config:
    ...     width = None
    >>> config, net = Config(), nn.ModuleList([nn.Identity(), nn.Identity()])
    >>> net[0].config = net[1].config = config
    >>> own_what_is_written(net, [Place("0", ("config", "width"))])
    >>> net[0].config is net[1].config, net[0].config is config
    (True, False)

    Whoever else holds the old ones (another model, a variable of the user's) keeps them as they are. What is one object
    in the model stays one. Modules are written to themselves, and so are objects that only their own code can make.
    """
    wanted = {id(obj): obj for place in places for obj in _on_the_way(model, place)}
    if not wanted:
        return
    new, copies = Redirection(), []
    for obj in _leading_to(model, wanted):
        with suppress(TypeError):
            copies.append((new.remember(obj, emptied(obj)), obj))
    for made, obj in copies:
        _fill(made, obj, new)
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if name not in REGISTRIES and (other := new.pointed(value)) is not value:
                module.__dict__[name] = other


def _on_the_way(model: nn.Module, place: Place) -> Iterator[Any]:
    for n in range(1, len(place.path)):
        obj = read(model, Place(place.owner, place.path[:n]))
        if not isinstance(obj, tuple | nn.Module):
            yield obj


def _inside(obj: Any) -> list[Any]:
    """What a plain object or container holds directly."""
    found: list[Any] = []
    if isinstance(obj, dict):
        found += native(obj).values(obj)
    elif isinstance(obj, list | tuple):
        found += native(obj).__iter__(obj)
    found += getattr(obj, "__dict__", {}).values()
    return found + [value for _, value in slots(obj)]


def _leading_to(model: nn.Module, wanted: dict[int, Any]) -> Iterator[Any]:
    """The plain objects that can be reached from a model's modules and lead to one that is wanted."""
    holds: dict[int, list[Any]] = defaultdict(list)  # what an object is held by
    stack: list[tuple[Any, Any]] = [(value, None) for module in model.modules() for value in module.__dict__.values()]
    seen: set[int] = set()
    while stack:
        obj, by = stack.pop()
        plain = isinstance(obj, tuple) or (holder(obj) is not None and not isinstance(obj, nn.Module))
        if not plain or isinstance(obj, torch.Size | Tensor):
            continue
        if by is not None:
            holds[id(obj)].append(by)
        if id(obj) not in seen:
            seen.add(id(obj))
            stack += [(value, obj) for value in _inside(obj)]
    found = dict(wanted)
    pending = list(wanted)
    while pending:
        for by in holds[pending.pop()]:
            if id(by) not in found:
                found[id(by)] = by
                pending.append(id(by))
    return (obj for obj in found.values() if not isinstance(obj, tuple))


def _fill(made: Any, obj: Any, new: Redirection) -> None:
    if isinstance(obj, dict):
        for key, value in native(obj).items(obj):
            native(obj).__setitem__(made, key, new.pointed(value))
    elif isinstance(obj, list):
        list.extend(made, [new.pointed(value) for value in list.__iter__(obj)])
    for name, value in getattr(obj, "__dict__", {}).items():
        made.__dict__[name] = new.pointed(value)
    for member, value in slots(obj):
        member.__set__(made, new.pointed(value))


__all__ = ["own_what_is_written"]
