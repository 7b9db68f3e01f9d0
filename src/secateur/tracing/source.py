"""The model that a graph was traced from, for as long as it is still the model that was traced.

A graph is a value, but scores are read from weights, and those are in the model. So a graph keeps it, together with
what it looked like when it was traced: the kinds of its modules, the shapes and dtypes of its tensors, and the sizes
in attributes that its code read. Training changes none of these; a cut does, and so does another layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from secateur.compat import is_lazy
from secateur.distributed import plain_kind
from secateur.errors import PlanError
from secateur.state.held import Place, within


class TensorForm(NamedTuple):
    """Of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Source:
    """A traced model and what it looked like.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    >>> source = Source.of(net, {})
    >>> source.model is net
    True
    >>> net[1] = nn.Linear(8, 3)
    >>> source.model
    Traceback (most recent call last):
    secateur.errors.PlanError: Sequential has changed since it was traced (1.weight was float32 (2, 8), is float32
    (3, 8)); trace it anew
    """

    name: str  # of its class
    parameters: tuple[str, ...]  # those with several names by their first
    tensors: Mapping[str, TensorForm]  # parameters and buffers, under all their names
    modules: Mapping[str, type[nn.Module]]
    attributes: Mapping[Place, float]
    _model: nn.Module = field(repr=False)

    @staticmethod
    def of(model: nn.Module, attributes: Mapping[Place, float]) -> Source:
        """A model as it is now; `attributes` are the sizes that its code read."""
        return Source(
            type(model).__name__,
            tuple(name for name, _ in model.named_parameters()),
            *_looks(model)[:2],
            attributes,
            model,
        )

    @property
    def model(self) -> nn.Module:
        """The model; refused if it is not what it was."""
        found = self.difference()
        if found is not None:
            raise PlanError(f"{self.name} has changed since it was traced ({found}); trace it anew")
        return self._model

    def difference(self) -> str | None:
        """The first thing that is not as it was; None as long as there is none."""
        forms, kinds, modules = _looks(self._model)
        held = {place: _held(modules, place) for place in self.attributes}
        before: Mapping[Any, object]
        now: Mapping[Any, object]
        for before, now in ((self.modules, kinds), (self.tensors, forms), (self.attributes, held)):
            if before != now:
                name = next(name for name in (*before, *now) if before.get(name) != now.get(name))
                return f"{str(name) or 'the model'} was {_said(before.get(name))}, is {_said(now.get(name))}"
        return None


def _looks(model: nn.Module) -> tuple[dict[str, TensorForm], dict[str, type[nn.Module]], dict[str, nn.Module]]:
    """The forms of all tensors, the kinds of all modules, and these, in one walk: each plan asks several times."""
    forms, kinds, modules = {}, {}, dict(model.named_modules(remove_duplicate=False))
    for owner, module in modules.items():
        kinds[owner] = plain_kind(type(module))
        for registered in (module._parameters, module._buffers):
            for name, tensor in registered.items():
                if tensor is not None:
                    shape = () if is_lazy(tensor) else tuple(tensor.shape)
                    forms[f"{owner}.{name}" if owner else name] = TensorForm(shape, tensor.dtype)
    return forms, kinds, modules


def _held(modules: Mapping[str, nn.Module], place: Place) -> int | None:
    try:
        return int(within(modules[place.owner], place))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):  # nothing is there, or no number
        return None


def _said(thing: object) -> str:
    if isinstance(thing, TensorForm):
        return f"{str(thing.dtype).removeprefix('torch.')} {thing.shape}"
    return "not there" if thing is None else f"a {thing.__name__}" if isinstance(thing, type) else str(thing)
