"""Which of the floats that modules hold a model's code reads: a scale that nothing reads may be another after a cut."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from secateur.state.held import Place
from secateur.state.leftovers import let_go
from secateur.state.patches import patched
from secateur.tracing.capture import ModelCall, captured


def unread_floats(model: nn.Module, example: Any, among: Collection[Place]) -> set[Place]:
    """Those of some places that a run on the example does not read, in this or in any other module of the class.

    >>> import torch
    >>> norm = nn.LayerNorm(4)
    >>> norm.scale = 0.5
    >>> places = [Place("", ("scale",)), Place("", ("eps",))]
    >>> [str(place) for place in unread_floats(norm, torch.zeros(1, 4), places)]
    ['scale']
    """
    if not among:
        return set()
    read: set[tuple[type, str]] = set()
    look = nn.Module.__getattribute__

    def noting(self: nn.Module, name: str) -> Any:
        value = look(self, name)
        if isinstance(value, float):
            read.add((type(self), name))
        return value

    made: list[Any] = []
    try:
        with patched((nn.Module, "__getattribute__", noting)):
            captured(model, [ModelCall(example)], made, fake=True)
    except Exception:  # it needs real values, so nothing is known
        return set()
    finally:
        let_go(made)
    kinds = {name: type(module) for name, module in model.named_modules()}
    return {place for place in among if len(place.path) == 1 and (kinds[place.owner], place.path[0]) not in read}


__all__ = ["unread_floats"]
