"""One record per op: everything that the library knows of it, in one place.

A record is made by decorating the function that says what the op does to axes, and gets further parts by decorating
further functions, beside it in the same file:

    @op(aten.cumsum.default, called="cumsum")
    def cumsum(call, x, dim): ...              # what it does to axes

    @cumsum.absent
    def _(op, x, dim): ...                     # what it computes when some positions are absent

The parts, each needed only where an op differs from the plain case:

- `sizes`: which arguments of the torch functions that lead to the op are sizes, and of what. Functions in `called` have
  none: their ints number dimensions, or are sizes of what the record fixes.
- `cost`: layouts whose sizes, multiplied, are the multiply-accumulates.
- `absent`: the op over what is present. Without it the op itself must do: NaN goes along with elements.
- `product`, `backward`: the op, and that of its backward pass, as a product of data with a weight.
- `resize`: numbers among the op's own arguments that follow the shapes of its operands.
- `fake`, `precise`: how to run it where torch cannot, on fake tensors and in double precision.
- `settled`: what stands for its draws, the same at every position, where models of different widths are compared.

`tests/contract` runs every record against the op itself and fails where a part that is needed is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from secateur.compat import FUNCTION_HOMES, OpOverload, OpOverloadPacket, aten, is_pointwise, schema
from secateur.ops.arguments import ASIDE

Function = Callable[..., Any]

_RECORDS: dict[Any, Record] = {}
_NAMED: dict[str, Record] = {}  # of ops of other libraries, which are not there before these are imported
_FUNCTIONS: dict[Any, Record] = {}
_SIZES: dict[Any, Function] = {}
_ALIKE: dict[str, Any] = {}  # by the name of an op, a function that does the same and of which something is known
_BACKWARD: dict[Any, Function] = {}


class Record:
    """What is known of some ops that differ in nothing that matters, or of a torch function that is seen as a whole."""

    def __init__(self, axes: Function, *, creates: bool = False, by_row: bool = False) -> None:
        self.axes = axes
        self.creates = creates  # it can make dimensions that its inputs do not have
        self.by_row = by_row  # it looks at rows one by one, also where they are not tied together (`Value.rows`)
        self.parts: dict[str, Function] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What it does to axes, for the record of another op."""
        return self.axes(*args, **kwargs)

    def sizes(self, *functions: Any) -> Callable[[Function], Function]:
        """`(explain, out, *args, **kwargs)`: which arguments of torch functions, by name or themselves, are sizes.

        However a function is called, these are `bound`: in its order, with defaults, by keyword what has no place.
        """

        def register(signature: Function) -> Function:
            _neutral(functions, signature)
            return signature

        return register

    def known_as(self, name: str) -> None:
        """An op of another library that does the same: `"library::op"`."""
        _put(_NAMED, name, self)

    def cost(self, function: Function) -> Function:
        """`(out, *args)`, each a `Value`: tuples of layouts whose sizes, multiplied and summed, are what it costs."""
        return self._part("cost", function)

    def absent(self, function: Function) -> Function:
        """`(op, *args)`, with NaN for what is absent: the result, with NaN for what nothing present goes into."""
        return self._part("absent", function)

    def product(self, function: Function) -> Function:
        """`(*args)`: the op as a product of data with a weight, a `MatrixProduct`."""
        return self._part("product", function)

    def backward(self, op: Any) -> Callable[[Function], Function]:
        """`(*args)` of the op of its backward pass: the weight, and the gradient as (groups, rows, outputs)."""

        def register(function: Function) -> Function:
            _put(_BACKWARD, op, function)
            return function

        return register

    def resize(self, function: Function) -> Function:
        """`(args, whole)`: bring numbers among the args in line with tensors that had the shapes `whole`."""
        return self._part("resize", function)

    def fake(self, function: Function) -> Function:
        """`(*args)`: a tensor like the result, for fake tensors."""
        return self._part("fake", function)

    def precise(self, function: Function) -> Function:
        """`(itemsize, *args)`: the result in double precision; `itemsize` is of the model's own numbers."""
        return self._part("precise", function)

    def settled(self, function: Function) -> Function:
        """`(op, *args)`: the result when what it draws is drawn once, or expected, for all positions."""
        return self._part("settled", function)

    def _part(self, name: str, function: Function) -> Function:
        if name in self.parts:
            raise ValueError(f"{self.axes.__name__} has a part {name!r} already")
        self.parts[name] = function
        return function


def named(text: str) -> list[Any]:
    """ATen ops by name, or all overloads of one: `named("mm.default fill")`."""
    return [attrgetter(name)(aten) for name in text.split()]


def overloads(*ops: Any) -> Iterator[Any]:
    """Ops that are given themselves or by name, all overloads where none is said; not those that this torch lacks."""
    for each in filter(None, (one for given in ops for one in (named(given) if isinstance(given, str) else (given,)))):
        packet = isinstance(each, OpOverloadPacket)
        yield from (getattr(each, name) for name in each.overloads()) if packet else (each,)


def op(
    *ops: Any, called: str | Iterable[Any] = (), creates: bool = False, by_row: bool = False
) -> Callable[[Function], Record]:
    """Make the record of one or more ops; decorates what they do to axes: `(call, *args, **kwargs) -> Value(s)`.

    Ops are given themselves, or by name (`"mm.default fill"`: a name alone means all overloads); those that this torch
    does not have are left out. Arguments are the op's own, with a `Value` in the place of each tensor. `called` are
    torch functions, by name or themselves, whose ints are not sizes of anything that can be cut.
    """

    def register(axes: Function) -> Record:
        record = Record(axes, creates=creates, by_row=by_row)
        for overload in overloads(*ops):
            _put(_RECORDS, overload, record)
        _neutral(called.split() if isinstance(called, str) else called, _no_sizes)
        return record

    return register


def function(*functions: Any) -> Callable[[Function], Record]:
    """Make the record of torch functions that are seen as a whole, before they are taken apart into ops."""

    def register(axes: Function) -> Record:
        record = Record(axes)
        for each in functions:
            _put(_FUNCTIONS, each, record)
            _ALIKE[each.__name__] = each
        return record

    return register


def _put(registry: dict[Any, Any], key: Any, value: Any) -> None:
    if registry.get(key, value) is not value:
        raise ValueError(f"{key} has a record already")
    registry[key] = value


def _neutral(functions: Iterable[Any], signature: Function) -> None:
    """Register what the arguments of torch functions are; a name stands for every function and method of that name."""
    for each in functions:
        named = isinstance(each, str)
        for found in dict.fromkeys(getattr(home, each, None) for home in FUNCTION_HOMES) if named else (each,):
            if found is not None:
                _put(_SIZES, found, signature)
        if named:
            _put(_SIZES, each, signature)
            _ALIKE.setdefault(each, each)


def _no_sizes(*_: Any, **__: Any) -> None:
    """Ints number dimensions, or describe dimensions that the record fixes."""


# looking up ------------------------------------------------------------------------------------------------------

function_record = _FUNCTIONS.get
sizes_of = _SIZES.get


@cache
def alike(op: Any) -> Any:
    """The torch function, or its name, that an ATen op does the same as; anything else is itself."""
    packet = getattr(op, "overloadpacket", op)
    if not isinstance(packet, OpOverloadPacket) or not str(packet).startswith("aten."):
        return op
    homes = (getattr(home, packet.__name__, None) for home in FUNCTION_HOMES)
    return _ALIKE.get(packet.__name__) or next(filter(None, homes), op)


backward_of = _BACKWARD.get


@cache
def record_of(op: Any) -> Record | None:
    """The record of an op: its own, that of the op it is the in-place or out variant of, or the elementwise one."""
    found = _own(op)
    if found is None and schema(op).is_mutable:
        found = next(filter(None, map(record_of, _functional(op))), None)
    if found is None and is_pointwise(op):
        from secateur.ops.pointwise import elementwise

        found = elementwise
    return found


def _own(op: Any) -> Record | None:
    found = _RECORDS.get(op)
    return _NAMED.get(schema(op).name) if found is None and is_op(op) else found


def part(op: Any, name: str) -> Function | None:
    """A part of the very record of an op or a function, not of one it is a variant of; None where it has none."""
    found = _own(op) or _FUNCTIONS.get(op)
    return None if found is None else found.parts.get(name)


def records() -> dict[Any, Record]:
    """Every op with a record of its own."""
    return dict(_RECORDS)


def function_records() -> dict[Any, Record]:
    """Every torch function that is seen as a whole."""
    return dict(_FUNCTIONS)


def _functional(op: Any) -> Iterator[Any]:
    """`aten.add_.Tensor` -> `aten.add.Tensor`, `aten.full.out` -> `aten.full.default` and `aten.full.names`."""
    namespace, _, name = schema(op).name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    others = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return (o for o in others if not schema(o).is_mutable and _takes(o) == _takes(op))


def _takes(op: Any) -> list[tuple[str, str]]:
    """The arguments that what an op does to axes can depend on."""
    given = [argument for argument in schema(op).arguments if not argument.is_out and argument.name not in ASIDE]
    return [(argument.name, str(argument.type)) for argument in given]


class Asked(NamedTuple):
    """What is asked of an ATen op each time that it runs, and is always the same."""

    op: Any  # with which its id stays its own
    name: str  # of all its overloads
    composed: bool  # whether ATen has it, so that it may be made of others
    fake: Function | None
    buffers: list[str]  # arguments for its results
    shares: tuple[bool | None, ...]  # for each result, whether it is what was written into, or another view; or is new


_ASKED: dict[int, Asked] = {}


def asked(op: Any) -> Asked:
    """What is asked of an ATen op each time, without looking for it each time."""
    found = _ASKED.get(id(op))
    if found is None:
        aliases = (result.alias_info for result in schema(op).returns)
        shares = tuple(alias and bool(alias.is_write) for alias in aliases)
        name = str(op).removeprefix("aten.").rpartition(".")[0]
        found = Asked(op, name, op.namespace == "aten", part(op, "fake"), out_arguments(op), shares)
        _ASKED[id(op)] = found
    return found


@cache
def out_arguments(op: Any) -> list[str]:
    """The arguments of an op that are buffers for its results."""
    return [argument.name for argument in schema(op).arguments if argument.is_out]


def is_op(run: Any) -> bool:
    """Whether something that ran is an ATen op and not a function that is seen as a whole."""
    return isinstance(run, OpOverload)
