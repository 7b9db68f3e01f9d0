"""Numbers that modules keep beside those that the traced run read: what else says a size, and records of the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import nn

from secateur.axes import free_atoms
from secateur.state.held import Key, Place, Walk, is_number, read
from secateur.tracing.graph import Graph, Site
from secateur.tracing.roles import Roles, roles
from secateur.tracing.stated import is_torchs, tensors_below

Written = tuple[Place, Any, Any]  # a place, what it holds, what it will hold
_WIDTH = re.compile(
    r"((in|input|out|output|hidden|inner|mid|middle|embed|embedding|model|proj|ffn|mlp|intermediate|num|n)_?)*"
    r"(channels?|features?|planes|filters|units|dims?|width|chs?|c[12]?|d_(model|inner|ff|hidden))"
    r"|(in|input|out|output|hidden|inner|embed|embedding|intermediate)_size"
)
_INPUT = re.compile(r"(in|input)(?![a-z])|c1")
_OUTPUT = re.compile(r"(out|output)(?![a-z])|c2")


def told_sizes(
    graph: Graph, model: nn.Module, after: Mapping[str, Sequence[int]], known: Collection[Place]
) -> Iterator[Written]:
    """Attributes such as `in_channels` that the traced run did not read: another method may.

    One follows if what its module's constructor made with it will have one and the same other size (`graph.stated`).
    Where that does not tell, one follows that has the name of a width, if everything in its module that has this size,
    at least one dimension of a parameter, will have one and the same other. `in…` looks at what the module reads but
    does not make, `out…` at what it makes but does not read.
    """
    known = {*known, *graph.equations.read}
    for one in graph.stated:
        sites = (Site(name, i) for name in one.tensors for i in range(len(graph.layouts[name])))
        sizes = {after[site.tensor][site.dim] for site in sites if _layout(graph, site).size == one.value}
        if one.place not in known and len(sizes) == 1:
            known.add(one.place)
            if (new := sizes.pop()) != one.value:
                yield one.place, one.value, new
    said = [place for place in _widths(model) if place not in known]
    if not said:
        return
    below = tensors_below(name for name in graph.layouts if graph.kinds[name] != "attribute")
    known_roles = cache(roles)  # asked for few names, and all that the runs did is gone through for it
    for place in said:
        value, name = read(model, place), place.path[0].strip("_").lower()
        sizes = {after[s.tensor][s.dim] for s in _fitting(graph, known_roles, below.get(place.owner, ()), name, value)}
        if len(sizes) == 1 and (new := sizes.pop()) != value:
            yield place, value, new


def _widths(model: nn.Module) -> Iterator[Place]:
    """Attributes with the name of a width; those of torch's own modules are kept true elsewhere."""
    for owner, module in model.named_modules():
        if not is_torchs(type(module)):
            for name, value in module.__dict__.items():
                if is_number(value) and value > 1 and _WIDTH.fullmatch(name.strip("_").lower()):
                    yield Place(owner, (name,))


def _fitting(
    graph: Graph, roles_in: Callable[[Graph], Roles], tensors: Iterable[str], name: str, value: int
) -> list[Site]:
    """The dimensions of tensors that an attribute of this name and value may speak of."""
    sites = [Site(tensor, i) for tensor in tensors for i in range(len(graph.layouts[tensor]))]
    if _INPUT.match(name) or _OUTPUT.match(name):
        known = roles_in(graph)
        ours, others = (known.reads, known.makes) if _INPUT.match(name) else (known.makes, known.reads)
        beyond = {atom for site in sites if site in others for atom in free_atoms(_layout(graph, site))}
        mine = [site for site in sites if site in ours]
        sites = [site for site in mine if beyond.isdisjoint(free_atoms(_layout(graph, site)))] or mine
    return [site for site in sites if _layout(graph, site).size == value]


def _layout(graph: Graph, site: Site) -> Any:
    return graph.layouts[site.tensor][site.dim]


def kept_twice(model: nn.Module, written: Sequence[Written]) -> Iterator[Written]:
    """Numbers that a module keeps twice: what its code reads (`_sizes`), and a record of the same name (`sizes`).

    Some modules rebuild the first from the second when they are copied; torch's own have no such names.
    """
    owners = {owner for owner in {place.owner for place, *_ in written} if _may_repeat(model.get_submodule(owner))}
    if not owners:
        return
    known = {place for place, *_ in written}
    new = {(place.owner, _label(model, place), was): value for place, was, value in written}
    held: dict[Place, int] = {}

    def look(value: Any, place: Place) -> Any:
        if place not in known and is_number(value):
            held[place] = value
        return value

    Walk(model).replace(look, owners)
    for place, value in held.items():
        now = new.get((place.owner, _label(model, place), value))
        if now is not None and now != value:
            yield place, value, now


def _may_repeat(module: nn.Module) -> bool:
    return not is_torchs(type(module)) or len({name.lstrip("_") for name in module.__dict__}) < len(module.__dict__)


def _label(model: nn.Module, place: Place) -> tuple[Any, ...]:
    """What a number is called, whether it is an attribute, in a dict, or beside its name in a pair."""
    first, *rest = place.path
    name = str(first).lstrip("_")
    if not rest:
        return (name,)
    last = rest[-1]
    if isinstance(last, Key):
        return name, last.key
    beside = read(model, Place(place.owner, place.path[:-1]))
    if last == 1 and isinstance(beside, tuple | list) and len(beside) == 2 and isinstance(beside[0], str):
        return name, beside[0]
    return name, tuple(rest)


__all__ = ["Written", "kept_twice", "told_sizes"]
