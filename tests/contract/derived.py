"""Samples that follow from others: of `out` variants, and of ops with torch's `pointwise` tag."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from commutation import SizeOf
from sampling import Draw, Sample
from torch import Tensor

from secateur.compat import aten, is_pointwise


def returns_tensors(op: Any) -> bool:
    """TorchScript keeps ops on plain numbers and containers under the same names."""
    return any("Tensor" in str(result.type) and "Dict" not in str(result.type) for result in op._schema.returns)


def takes_names(op: Any) -> bool:
    """Some torches let dimensions have names; no rule is ever called with one."""
    return "dimname" in op._overloadname


def writes_out(op: Any) -> bool:
    return any(arg.is_out for arg in op._schema.arguments)


def functional_of(op: Any) -> Any:
    """The op that an `out` variant computes: `aten.fill.Scalar_out` is `aten.fill.Scalar`, put somewhere."""
    packet = getattr(aten, op._schema.name.partition("::")[2])
    name = op._overloadname.removesuffix("out").removesuffix("_") or "default"
    return getattr(packet, {"float": "p"}.get(name, name))


def into_out(op: Any, sample: Sample) -> Sample:
    """The sample of the functional op, with an empty tensor, which torch resizes, for every output."""
    plain = _numbers(sample.args)
    made = functional_of(op)(*plain, **sample.kwargs)
    made = list(made) if isinstance(made, tuple | list) else [made]
    names = [arg.name for arg in op._schema.arguments if arg.is_out]
    accepted = {arg.name for arg in op._schema.arguments}
    kwargs = {key: value for key, value in sample.kwargs.items() if key in accepted}
    kwargs |= {name: tensor.new_empty(0) for name, tensor in zip(names, made, strict=True)}
    return Sample(sample.args, kwargs, sample.values, sample.run)


def _numbers(item: Any) -> Any:
    if isinstance(item, SizeOf):
        return item.value
    return type(item)(map(_numbers, item)) if isinstance(item, tuple | list) else item


def pointwise_ops() -> Iterator[Any]:
    """Every ATen op that carries torch's tag and makes a tensor, but those that write into an `out` argument."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    for name in sorted(names):
        packet = getattr(aten, name.removeprefix("aten::"), None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if is_pointwise(op) and returns_tensors(op) and not writes_out(op):
                yield op


def by_schema(op: Any, draw: Draw) -> Sample:
    """Arguments that fit an op's schema, of the first kind of number that it accepts."""
    a, b = draw.sizes(2)
    arguments = op._schema.arguments
    tensors = [arg.name for arg in arguments if "Tensor" in str(arg.type)]
    others = [(a, b), (b,), (a, 1)] if not op._schema.is_mutable else [(a, b), (b,)]
    shapes = {name: draw.rng.choice(others) for name in tensors[1:]} | {tensors[0]: (a, b)}
    for make in (draw.x, draw.positive, lambda *shape: draw.ints(3, *shape) + 1, draw.bools, draw.complex):
        given = {arg.name: make(*shapes[arg.name]) if arg.name in tensors else _plain(arg) for arg in arguments}
        args = tuple(given[arg.name] for arg in arguments if not arg.kwarg_only)
        kwargs = {arg.name: given[arg.name] for arg in arguments if arg.kwarg_only}
        try:
            op(*(x.clone() if isinstance(x, Tensor) else x for x in args), **kwargs)
        except (RuntimeError, TypeError, ValueError):
            continue
        return Sample(args, kwargs)
    raise NotImplementedError(f"no kind of number fits {op}")


def _plain(arg: Any) -> Any:
    if arg.has_default_value() and arg.name not in ("min", "max"):
        return arg.default_value
    return {"float": 0.5, "int": 1, "bool": False, "number": 2, "Optional[number]": 1}.get(str(arg.type))
