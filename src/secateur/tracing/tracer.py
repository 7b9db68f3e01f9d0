"""What one run of a model teaches: how dimensions belong together, what ops cost, who reads and who makes what.

Every dimension of every tensor of the model starts as an axis of its own. The model then runs once, and each op that
runs says, through its record (`secateur.ops`), which dimensions are one and the same, which are made of others and
which must stay as they are: a batch norm ties its four vectors to the channels, a reshape splits a width into heads and
dims. What is known of a tensor (a `Value`: a layout per dimension) is kept with the tensor, so results of ops carry it
on. Nothing is decided here and the model is not touched; `graph` reads the outcome off.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from secateur.axes import Atom, Layout, unify, why_fixed
from secateur.compat import reads_out, schema, takes_sizes
from secateur.ops.create import LIFTED
from secateur.ops.record import Record, asked, record_of
from secateur.ops.value import Call, Value, bind, known, value_of
from secateur.sizes.explain import Explainer
from secateur.sizes.size import Dim, Expr
from secateur.state.held import Place
from secateur.tracing.steps import TimedOp, step

SEVERAL = (list, tuple)  # what arguments come in; asked for so often that a union made on the spot would tell


@dataclass(frozen=True)
class OpCost:
    """The product of the sizes of `layouts` multiply-accumulates, spent in `module`."""

    module: str
    op: str
    layouts: tuple[Layout, ...]


@dataclass(frozen=True)
class Use:
    """One op that data has part in: what it was given, which of the model's tensors that is made of, what it made."""

    op: Any
    given: tuple[tuple[tuple[Layout, ...], frozenset[str] | None], ...]
    made: tuple[tuple[Layout, ...], ...]
    summed: tuple[tuple[Layout, frozenset[str] | None], ...]  # what products sum over, and the weights that read it


@dataclass
class Tracer:
    """Collects everything. It never touches the model."""

    sizes: Explainer = field(default_factory=Explainer)
    costs: list[OpCost] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    said: dict[Place, Expr] = field(default_factory=dict)  # attributes that only say what weights are
    steps: list[TimedOp] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, None] = field(default_factory=dict)  # where numbers were read from data
    ops: int = 0
    timed: bool = True  # whether ops are remembered one by one, with what they cost
    module: str = ""

    def shape_of(self, tensor: Tensor, shape: torch.Size) -> torch.Size:
        """The shape of a tensor, as sizes that remember their dimension."""
        value = known(tensor)
        if value is None:
            return shape
        return torch.Size([self.sizes.size(n, Dim(dim)) for n, dim in zip(shape, value.dims, strict=True)])

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, seen: bool = True) -> None:
        """Apply the record of one op that has just run; `seen`: the call that led to it, with its sizes, was."""
        self.ops += 1
        tensors = tensors_among(out if isinstance(out, SEVERAL) else (out,))
        flat = tensors_among((args, kwargs)) if kwargs else tensors_among(args)
        if not tensors and not schema(op).is_mutable:
            if reads_out(op) and any(value_of(t).storage.made_of is None for t in flat):
                self.decisions.setdefault(self.sizes.where())
            return
        if op == LIFTED:
            self._written(flat)
        values = [value_of(t) for t in flat]
        if self.timed:
            self.steps.append(step(op, args, kwargs, value_of))
        found, call = record_of(op), Call(self.sizes, op, asked(op).name, tensors)
        if not (found is not None and found.creates) and all(map(Value.constant, values)):
            for tensor in tensors:
                if known(tensor) is None or not any(tensor is t for t in flat):
                    bind(tensor, Value([_handed_on(i, n, values, call) for i, n in enumerate(tensor.shape)]))
            return
        result: Any = None
        if found is None:
            self.unknown[str(op)] = self.unknown.get(str(op), 0) + 1
            call.opaque(*values, reason="no rule for this op")
        elif not seen and takes_sizes(op):
            call.opaque(*values, reason="called from where its sizes cannot be seen")
        else:
            result = self._applied(found, call, args, kwargs)
        self._store(op, args, tensors, result, call)
        self._use(call, values, tensors)

    def _written(self, tensors: Iterable[Tensor]) -> None:
        """Numbers that the model's code makes into a tensor, as `torch.tensor([0, 1])` does."""
        for tensor in (t for t in tensors if known(t) is None):
            reason = f"a tensor of numbers that the code makes ({self.sizes.where()})"
            bind(tensor, Value([Atom(n, reason) for n in tensor.shape]))

    def _applied(self, found: Record, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a record makes of a call; buffers for results are tied to these."""
        buffers = [kwargs[name] for name in asked(call.op).buffers if name in kwargs] if kwargs else []
        rest = {k: _lift(v) for k, v in kwargs.items() if not any(v is buffer for buffer in buffers)}
        given = _lift(args, found.by_row)
        result = found(call, *given, **rest)
        for buffer, value in zip(buffers, result if isinstance(result, list | tuple) else [result], strict=False):
            for a, b in zip(value_of(buffer).dims, value.dims, strict=False):
                if a.size == b.size:
                    unify(a, b)
        self._spend(found, call, result, given, rest)
        return result

    def whole(self, found: Record, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Apply the record of a torch function that has just run as a whole."""
        self.ops += 1
        tensors = tensors_among(out if isinstance(out, tuple | list) else (out,))
        call = Call(self.sizes, func, func.__name__, tensors)
        if self.timed:
            self.steps.append(step(func, args, kwargs, value_of))
        given, rest = _lift(args), {k: _lift(v) for k, v in kwargs.items()}
        result = found(call, *given, **rest)
        self._spend(found, call, result, given, rest)
        for tensor, value in zip(tensors, result if isinstance(result, list) else [result], strict=True):
            if value.shape != tuple(tensor.shape):
                raise AssertionError(f"the rule of {call.name} made {value.shape}, it is {tuple(tensor.shape)}")
            bind(tensor, value)
        self._use(call, [value_of(t) for t in tensors_among((args, kwargs))], tensors)

    def _spend(self, found: Record, call: Call, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note what a call costs."""
        cost = found.parts.get("cost") if self.timed else None
        for layouts in () if cost is None else cost(result, *args, **kwargs):
            self.costs.append(OpCost(self.module, call.name, layouts))

    def _use(self, call: Call, values: list[Value], tensors: list[Tensor]) -> None:
        """Remember who reads and who makes what."""
        of = [value.storage.made_of for value in values]
        known = [names for names in of if names is not None]
        made = [value_of(tensor) for tensor in tensors]
        for value in made:
            value.storage.made_of = frozenset().union(*known) if len(known) == len(of) else None
        if len(known) < len(of) or call.summed:
            given = tuple((value.dims, names) for value, names in zip(values, of, strict=True))
            self.uses.append(Use(call.op, given, tuple(value.dims for value in made), tuple(call.summed)))

    def _store(self, op: Any, args: tuple[Any, ...], tensors: list[Tensor], result: Any, call: Call) -> None:
        results = list(result) if isinstance(result, list | tuple) else [result]
        if result is not None and len(results) < len(tensors):
            results += [None] * (len(tensors) - len(results))
        shares = asked(op).shares
        for i, tensor in enumerate(tensors):
            value = results[i] if result is not None else None
            if value is None:
                value = Value([call.fixed(n) for n in tensor.shape])
            written = shares[min(i, len(shares) - 1)] if shares else None
            if written is not None and args and isinstance(args[0], Tensor):
                base = value_of(args[0])
                if written:
                    base.storage.write(base, value)
                value.storage = base.storage
            if value.shape != tuple(tensor.shape):
                raise AssertionError(f"the rule of {op} made {value.shape}, the op {tuple(tensor.shape)}")
            bind(tensor, value)


def _lift(item: Any, rows: bool = False) -> Any:
    """Arguments, with what is known of each tensor in its place."""
    if isinstance(item, Tensor):
        value = value_of(item)
        if value.rows is not None and not rows:
            value.tie_rows()
        return value
    if isinstance(item, SEVERAL):
        return [_lift(i, rows) for i in item]
    return item


def tensors_among(items: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, SEVERAL):
            found += tensors_among(item)
        elif isinstance(item, dict):
            found += tensors_among(item.values())
    return found


def _handed_on(at: int, size: int, values: Sequence[Value], call: Call) -> Atom:
    """A dimension of what is computed from constants alone; its reason is that of the likeliest of them."""
    every = [(i, dim) for value in values for i, dim in enumerate(value.dims)]
    same = [(i, dim) for i, dim in every if dim.size == size]
    likely = [one for one in same if one[0] == at] or same
    if not likely:  # a size of its own: a view of one that divides it, or of any
        likely = [(i, dim) for i, dim in every if dim.size > 1 and size % dim.size == 0] or every
    return Atom(size, why_fixed(*(dim for _, dim in likely))) if likely else call.fixed(size)
