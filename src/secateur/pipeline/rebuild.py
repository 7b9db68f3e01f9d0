"""A model made anew from how it was built and what was cut, without its weights; and whether that is the same model.

Sizes alone do not tell: another activation, a dropout or a hand-made change fits all tensors and computes something
else. So everything that modules hold is compared: their classes, tensors, plain values and functions.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.distributed import plain_kind
from secateur.errors import PlanError
from secateur.planning.plans import Plan
from secateur.state.held import Place, holder, items, named_tensors
from secateur.surgery import carry_out
from secateur.surgery.bias import add_biases, added_biases
from secateur.surgery.blocks import shortened
from secateur.surgery.places import reached
from secateur.tracing.constructor import Maker
from secateur.tracing.makers import maker_of
from secateur.tracing.origins import Origin
from secateur.tracing.shell import buffers, shell, tables

_PASSING = frozenset(("training", "generation_config", "name_or_path", "_is_hf_initialized"))
_OF_FILES = frozenset(("architectures", "dtype", "torch_dtype", "transformers_version"))  # in a config


def rebuilt(maker: Maker, plan: Plan | None, biases: tuple[str, ...], parameters: int) -> nn.Module:
    """A cut model from its constructor: parameters on the meta device, in the sizes that the plan leaves."""
    made = shell(maker, parameters)
    left = None if plan is None else shortened(made, plan)
    add_biases(made, biases)
    if left is not None:
        carry_out(made, held_here(made, left))
    return made


def held_here(model: nn.Module, plan: Plan) -> Plan:
    """A plan without tensors in plain attributes that are empty before a model has run: caches."""
    modules = dict(model.named_modules())

    def held(place: Place) -> bool:
        """Whether the way to a place does not end in nothing, or in a container that was not filled yet."""
        last: Any = modules.get(place.owner)
        for end, step in enumerate(place.path, 1):
            try:
                last = reached(modules, Place(place.owner, place.path[:end]))
            except PlanError:  # where it leads elsewhere, it is refused when the plan is carried out
                unset = end == 1 and isinstance(last, nn.Module) and not hasattr(last, str(step))
                empty = isinstance(last, list | tuple | dict) and not last
                return not (unset or last is None or empty)
        return last is not None

    return replace(plan, kept_in_attributes=tuple(each for each in plan.kept_in_attributes if held(each[0])))


@dataclass(frozen=True)
class KnownOrigin:
    """How a model is built, if that makes the same model again, but for some tables; if not, why."""

    origin: Origin | None
    why: str = ""
    tables: Mapping[str, Tensor] = field(default_factory=dict)


def origin_in(model: nn.Module, plan: Plan | None) -> KnownOrigin:
    """How a model is built that a plan led to, held against the model.

    >>> origin_in(nn.Linear(2, 2), None).why
    'how a Linear is built is not known'
    """
    maker = maker_of(model) if plan is None else None
    origin = plan.origin if plan is not None else None if maker is None else Origin.of(maker)
    if origin is None:
        return KnownOrigin(None, f"how a {plain_kind(type(model)).__name__} is built is not known")
    if not origin.library:
        return KnownOrigin(origin, "", dict(buffers(model)))  # whoever loads it builds it, and answers for that
    try:
        made = rebuilt(origin.maker(), plan, added_biases(model), sum(1 for _ in model.parameters()))
        why = unlike(model, made)
    except Exception as error:  # any code of the library's may run here
        return KnownOrigin(None, f"{origin.name} could not be built anew: {type(error).__name__}: {error}"[:400])
    return KnownOrigin(None, why) if why is not None else KnownOrigin(origin, "", own_tables(model, made))


def unlike(model: nn.Module, made: nn.Module) -> str | None:
    """The first thing about a model that one made anew does not have; None if there is none but for values of tensors.

    >>> unlike(nn.Dropout(0.5), nn.Dropout(0.1))
    'p is 0.5, its constructor makes it 0.1'
    """
    mine, theirs = dict(model.named_modules()), dict(made.named_modules())
    kinds = ({name: plain_kind(type(module)).__name__ for name, module in each.items()} for each in (mine, theirs))
    forms = ({name: str(tuple(tensor.shape)) for name, tensor in named_tensors(each)} for each in (model, made))
    ties = ({name: min(group) for group in _groups(each) for name in group} for each in (model, made))
    for one, other in (kinds, forms, ties):
        for name in {**one, **other}:
            if one.get(name) != other.get(name):
                return _said(name or "the model", one.get(name, "not there"), other.get(name, "nothing"))
    seen: set[tuple[int, int]] = set()
    return next((found for name in mine for found in _odd(mine[name], theirs[name], name, seen)), None)


def _groups(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _said(where: str, here: object, there: object) -> str:
    return f"{where.lstrip('.')} is {here!s:.80}, its constructor makes it {there!s:.80}"


def _odd(a: Any, b: Any, where: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    """What two objects hold that is not the same."""
    mine, theirs = holder(a), holder(b)
    if mine is None or theirs is None or (id(mine), id(theirs)) in seen:
        return
    seen.add((id(mine), id(theirs)))
    ours, others = dict(items(mine, a)), dict(items(theirs, b))
    for step, value in others.items():
        if step in _PASSING or (not isinstance(a, nn.Module) and _passing(step)):
            continue
        at = f"{where}.{step}" if isinstance(step, str) else f"{where}[{step}]"
        if step in ours or (isinstance(step, str) and hasattr(type(a), step)):
            yield from _differ(ours[step] if step in ours else getattr(type(a), step), value, at, seen)
        else:
            yield _said(at, "not there", value)
    for name in ours.keys() - others.keys() - _PASSING:  # what only takes the place of something in its class
        if isinstance(a, nn.Module) and isinstance(name, str) and hasattr(type(a), name):
            yield _said(f"{where}.{name}", ours[name], getattr(type(a), name))


def _passing(step: Any) -> bool:
    return isinstance(step, str) and (step.startswith("_") or step in _OF_FILES)


def _differ(a: Any, b: Any, where: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    if a is b or (isinstance(a, Tensor) and isinstance(b, Tensor)) or isinstance(a, torch.device):
        return
    if isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _differ(one, other, f"{where}[{i}]", seen)
    elif type(a) is not type(b):
        yield _said(where, _short(a), _short(b))
    elif isinstance(a, nn.Module):  # one that is not registered
        return
    elif holder(a) is not None:
        yield from _odd(a, b, where, seen)
    elif not _same(a, b):
        yield _said(where, _short(a), _short(b))


def _short(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Tensor) or holder(value) is not None else repr(value)


def _same(a: Any, b: Any) -> bool:
    """Whether two plain values or functions of one type are the same."""
    if isinstance(a, types.FunctionType):
        return a.__code__ is b.__code__
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__
    if isinstance(a, functools.partial):
        return _same(a.func, b.func) if type(a.func) is type(b.func) else False
    if isinstance(a, int | float | complex | str | bytes | enum.Enum | torch.dtype | torch.Size | set | frozenset):
        return bool(a == b) or a != a
    return not isinstance(a, type | types.BuiltinFunctionType)


def own_tables(model: nn.Module, made: nn.Module) -> dict[str, Tensor]:
    """Tensors that no state dict has, and that a model made anew does not have as they are."""
    theirs = dict(tables(made))
    return {name: table for name, table in tables(model) if name in theirs and not _equal(table, theirs[name])}


def _equal(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype and not other.is_meta and not one.is_meta
    return same and torch.equal(one.cpu(), other.cpu())


__all__ = ["KnownOrigin", "held_here", "origin_in", "rebuilt", "unlike"]
