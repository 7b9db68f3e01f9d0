"""Configuration objects of Transformers, kept true where all layers agree, though a plan need not be loadable.

The constructor was followed (`tracing.constructor`), so it is known which dimensions and numbers each field is part of.
A field follows a cut if all of these come out right with its new value. Plans are often made one after another for the
same model, or for models of one configuration, so what following it told is remembered for the last few.
"""

from __future__ import annotations

import functools
import marshal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from secateur.axes import Layout, size_after
from secateur.axes.polynomial import Counts
from secateur.sizes.size import Expr
from secateur.state.held import Key, Place
from secateur.tracing.constructor import Constructed, Maker, constructed
from secateur.tracing.fields import agreed
from secateur.tracing.graph import Graph

_LIBRARIES = frozenset(("transformers", "diffusers"))  # whose constructors make the same of the same
_MOST_REMEMBERED = 8
_remembered: dict[object, Constructed] = {}  # the last one used comes last; no model is in it


def config_fields(
    graph: Graph, model: nn.Module, maker: Maker | None, counts: Counts, changed: Mapping[Place, Any]
) -> Iterator[tuple[Place, Any, Any]]:
    """Fields to rewrite, with their old and new values; `changed` are numbers in modules that a plan changes.

    Fields that the model's code reads are among these already, if they follow.
    """
    if maker is None or not any("config" in vars(module) for module in model.modules()):
        return
    try:
        made = _constructed(maker, model, graph.layouts)
    except Exception:  # any code of the user's may run here; then nothing is known of its fields
        return
    new = agreed(made.fields, _described(graph, counts, made, changed))
    for field, value in new.items():
        for place in _places(model, field, made.fields[field]):
            if place not in graph.equations.read and place not in changed:
                yield place, made.fields[field], value


def _constructed(maker: Maker, model: nn.Module, layouts: Mapping[str, Sequence[Layout]]) -> Constructed:
    """What a constructor makes; it is not followed again for a model of the same class, configuration and shapes."""
    key = _key(maker, model, layouts)
    made = None if key is None else _remembered.pop(key, None)
    if made is None:
        made = constructed(maker, model)
    if key is not None:
        _remembered[key] = made
        for oldest in list(_remembered)[:-_MOST_REMEMBERED]:
            _remembered.pop(oldest, None)
    return made


def _key(maker: Maker, model: nn.Module, layouts: Mapping[str, Sequence[Layout]]) -> object:
    """What decides what a constructor makes; None where that may be more than can be seen."""
    made_by = maker.function
    given = (made_by.func, *made_by.args) if isinstance(made_by, functools.partial) else (made_by,)
    if {str(each.__module__).partition(".")[0] for each in given} - _LIBRARIES - {__package__.partition(".")[0]}:
        return None
    try:
        arguments = marshal.dumps(dict(maker.arguments), 2)  # of plain data only; version 2 is the same for equal data
    except ValueError:
        return None
    shapes = tuple((name, tuple(dim.size for dim in dims)) for name, dims in layouts.items())
    return given, arguments, frozenset(map(type, model.modules())), shapes


def _described(
    graph: Graph, counts: Counts, made: Constructed, changed: Mapping[Place, Any]
) -> Iterator[tuple[Expr, Any]]:
    """What fields are part of, and what it must be after the cut."""
    for name, sizes in made.dims.items():
        for sized, layout in zip(sizes, graph.layouts.get(name, ()), strict=False):
            yield sized.expr, size_after(layout, counts)
    for place, expr in made.numbers.items():
        if place in graph.equations.held_now:
            yield expr, changed.get(place, graph.equations.held_now[place])


def _places(model: nn.Module, field: Place, value: float) -> Iterator[Place]:
    """Where the configuration objects that a model's modules hold, copies of it too, have a field."""
    first, seen = getattr(model, "config", None), set[int]()
    path = tuple(step.key if isinstance(step, Key) else step for step in field.path)
    for name, module in model.named_modules():
        config = vars(module).get("config")
        if type(config) is not type(first) or id(config) in seen:
            continue
        seen.add(id(config))
        held: Any = config
        for step in path[:-1]:
            held = vars(held).get(step) if hasattr(held, "__dict__") and isinstance(step, str) else None
        if hasattr(held, "__dict__") and vars(held).get(path[-1]) == value:
            yield Place(name, ("config", *path))
