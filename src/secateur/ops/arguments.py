"""The arguments of a torch function, each in its place, however the call was written.

`x.view(2, 3)`, `torch.chunk(input=x, chunks=2, axis=1)`, `torch.ops.aten.narrow.default(x, 0, 1, length=2)`: each says
in its own way what it means. What a record says of the arguments of a function is written once, by position: before it
is asked, a call is bound by the signature of what was called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch

from secateur.compat import OpOverload, OpOverloadPacket, schema

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# Names by which torch's own functions take arguments besides those of their ops.
_ALSO = {"input": "self", "axis": "dim", "keepdims": "keepdim", "x": "self", "a": "self", "x1": "self", "x2": "other"}
# What only says where a result goes and what it is made of.
ASIDE = {"out", "dtype", "layout", "device", "pin_memory", "requires_grad", "memory_format", "generator", "names"}


def bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments in the order of the function's own signature, with its defaults; what goes by keyword only stays.

    >>> bound(torch.chunk, (), {"axis": 1, "chunks": 2, "input": "x"})
    (('x', 2, 1), {})
    >>> bound(torch.Tensor.view, ("x", 2, 3), {})
    (('x', [2, 3]), {})

    A call that fits no signature that is known is left as it is.
    """
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    aside = {name: rest.pop(name) for name in ASIDE & rest.keys()}
    for form in _forms(function):
        placed = _placed(form, args, rest)
        if placed is not None:
            return placed[0], {**placed[1], **aside}
    return args, {**rest, **aside}


def with_numbers(
    function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], change: Callable[[Any], Any]
) -> Any:
    """The arguments, changed where the function takes something to compute with: no size, and no number of a dimension.

    >>> with_numbers(torch.full, ((2, 8), 8), {}, lambda _: 4)
    (((2, 8), 4), {})
    >>> with_numbers(torch.zeros, (2, 8), {}, lambda _: 4)
    ((2, 8), {})
    """
    rest = {name: value for name, value in kwargs.items() if name not in ASIDE}
    form = next((form for form in _forms(function) if _takes(form, args, rest)), None)
    if form is None:
        return args, kwargs
    counts = {name: "int" in parameter.annotation for name, parameter in form.parameters.items()}
    placed_by = (name for name, parameter in form.parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY)
    by_place = [*(counts[name] for name in placed_by), *(True for _ in args)]  # sizes one by one are more than that
    placed = tuple(arg if count else change(arg) for arg, count in zip(args, by_place, strict=False))
    return placed, {k: v if counts.get(_ALSO.get(k, k), True) else change(v) for k, v in kwargs.items()}


def _takes(form: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether arguments fit a signature, with no int in the place of a tensor."""
    placed = _placed(form, args, kwargs)
    kinds = (parameter.annotation for parameter in form.parameters.values())
    return placed is not None and not any(
        isinstance(value, int) and "Tensor" in kind for value, kind in zip(placed[0], kinds, strict=False)
    )


def _placed(form: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
    names = form.parameters
    renamed = {name if name in names else _ALSO.get(name, name): value for name, value in kwargs.items()}
    try:
        found = form.bind(*_gathered(form, args), **renamed)
    except TypeError:
        return None
    found.apply_defaults()
    return found.args, {name: value for name, value in found.kwargs.items() if name not in ASIDE}


def _gathered(form: inspect.Signature, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes given one by one, where a function takes a list of them and nothing else, as a list."""
    own = [parameter for parameter in form.parameters.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    lead = 1 if own and own[0].name == "self" else 0
    listed = len(own) == lead + 1 and own[lead].annotation == "List[int]"
    one_by_one = len(args) > lead and not isinstance(args[lead], list | tuple | torch.dtype)
    return (*args[:lead], list(args[lead:])) if listed and one_by_one else args


@cache
def _forms(function: Callable[..., Any]) -> tuple[inspect.Signature, ...]:
    """The signatures of a function: its own, or those of the ops of its name."""
    if isinstance(function, FunctionType):
        return (inspect.signature(function),)
    return tuple(_form(each) for each in _overloads(function) if not any(arg.is_out for arg in each.arguments))


def _overloads(function: Any) -> Iterator[Any]:
    if isinstance(function, OpOverload):
        yield schema(function)
        return
    named = getattr(torch.ops.aten, function.__name__, None) if hasattr(function, "__name__") else None
    packet = function if isinstance(function, OpOverloadPacket) else named
    yield from (schema(getattr(packet, name)) for name in (packet.overloads() if packet is not None else ()))


def _form(of: Any) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                arg.name,
                inspect.Parameter.KEYWORD_ONLY if arg.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=arg.default_value if arg.has_default_value() else inspect.Parameter.empty,
                annotation=str(arg.type),
            )
            for arg in of.arguments
        ]
    )
