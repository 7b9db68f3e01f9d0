"""Which rule says what an op does to axes. Keyed by the op itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Rule = Callable[..., Any]

_RULES: dict[Any, Rule] = {}
_CREATORS: set[Any] = set()
_FUNCTIONS: dict[Any, Rule] = {}
_SIZES: dict[Any, Rule] = {}


def rule(*ops: Any, creates: bool = False) -> Callable[[Rule], Rule]:
    """Register the rule of one or more ops: `(call, *args, **kwargs) -> Value | tuple of Values`.

    Arguments are the op's own, with a `Value` in the place of each tensor. `creates`: the op can make dimensions
    that do not come from its inputs, so it matters even when these are constant.
    """

    def register(function: Rule) -> Rule:
        for op in ops:
            for overload in (getattr(op, name) for name in op.overloads()) if _is_packet(op) else (op,):
                if overload in _RULES:
                    raise ValueError(f"{overload} has a rule already: {_RULES[overload].__name__}")
                _RULES[overload] = function
                if creates:
                    _CREATORS.add(overload)
        return function

    return register


def function_rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule for a whole torch function, seen before it is taken apart into ops."""

    def register(rule_function: Rule) -> Rule:
        for function in functions:
            _FUNCTIONS[function] = rule_function
        return rule_function

    return register


def sizes(*functions: Any) -> Callable[[Rule], Rule]:
    """Register which arguments of a torch function are sizes of what: `(tracer, out, *args, **kwargs)`."""

    def register(signature: Rule) -> Rule:
        for function in dict.fromkeys(functions):
            if function in _SIZES:
                raise ValueError(f"{function} has a size signature already")
            _SIZES[function] = signature
        return signature

    return register


def _is_packet(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverloadPacket)


function_rule_for = _FUNCTIONS.get
sizes_for = _SIZES.get


def creates(op: Any) -> bool:
    """Whether an op can make new dimensions."""
    return op in _CREATORS


@cache
def rule_for(op: Any) -> Rule | None:
    """The rule of an op: its own, that of the op it is the in-place or out variant of, or the elementwise one."""
    found = _RULES.get(op)
    if found is None and op._schema.is_mutable:
        functional = _functional(op)
        found = rule_for(functional) if functional is not None else None
    if found is None and torch.Tag.pointwise in op.tags:
        from secateur.trace.rules.pointwise import elementwise

        found = elementwise
    return found


def _functional(op: Any) -> Any:
    """`aten.add_.Tensor` -> `aten.add.Tensor`, `aten.mm.out` -> `aten.mm.default`; None where there is none."""
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    others = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return next((o for o in others if not o._schema.is_mutable and _takes(o) == _takes(op)), None)


def _takes(op: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments if not argument.is_out]


def out_arguments(op: Any) -> list[str]:
    """The arguments of an op that are buffers for its results."""
    return [argument.name for argument in op._schema.arguments if argument.is_out]


def registered() -> dict[Any, Rule]:
    """Every op with a rule of its own."""
    return dict(_RULES)
