"""What a plan writes to: numbers and lists that a model's modules hold."""

import enum
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from secateur.errors import PlanError
from secateur.state.held import Place, holder, items


def check_numbers(modules: Mapping[str, nn.Module], written: Iterable[tuple[Place, Any, Any]]) -> None:
    """Refuse to write where another number is than the one that is expected."""
    for place, was, _ in written:
        now = reached(modules, place)
        if isinstance(now, bool | enum.Enum) or not isinstance(now, int | float) or now != was:
            raise PlanError(f"the plan expects {place} to be {was}, here it is {reprlib.repr(now)}")


def reached(modules: Mapping[str, nn.Module], place: Place) -> Any:
    """What a place holds, if tracing looks there: never at a method, a hook, a registry or a class."""
    obj: Any = modules.get(place.owner)
    for at, step in enumerate(place.path):
        store = None if at and isinstance(obj, nn.Module) else holder(obj)
        if isinstance(obj, tuple) and not isinstance(obj, torch.Size):
            inside = dict(enumerate(obj))
        else:
            inside = {} if store is None else dict(items(store, obj))
        if step not in inside:
            raise PlanError(f"the plan sets {place}, no plain value of this model; is it for another model?")
        obj = inside[step]
    return obj


__all__ = ["check_numbers", "reached"]
