"""The record of one tracing run: what ops do to axes, what sizes are made of, what they cost."""

from __future__ import annotations

import numbers
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from secateur.axes import Atom, Concat, Layout, atoms, constant, fix, free_atoms, pieces, resolve, unify, why_fixed
from secateur.trace import registry
from secateur.trace.sizes import Dim, Expr, Lit, Op, Place, Size, expr_of, plain
from secateur.trace.steps import Step, step
from secateur.trace.value import Call, Value

_OWN = str(Path(__file__).parents[1])
_CAPTURE = str(Path(__file__).with_name("capture.py"))  # below its frames is whoever asked for the trace
_TORCH = str(Path(torch.__file__).parent)
_KEY = "_secateur_value"
_TAKES_ROWS = {torch.ops.aten.select.int, torch.ops.aten.unbind.int, torch.ops.aten.index_select.default}


@dataclass(frozen=True)
class Equation:
    """After any cut, `expr` must come out as the size of `layout`."""

    expr: Expr
    layout: Layout
    where: str


@dataclass(frozen=True)
class Comparison:
    """After any cut, the comparison must come out as it did, or the model takes another branch."""

    symbol: str
    left: Expr
    right: Expr
    outcome: bool
    where: str


@dataclass(frozen=True)
class ValueUse:
    """A size that was used as a number: what it counts can be cut, but not exactly."""

    expr: Expr
    use: str
    where: str


@dataclass(frozen=True)
class Cost:
    """`factor` × the product of the sizes of `layouts` multiply-accumulates, spent in `module`."""

    module: str
    op: str
    factor: int
    layouts: tuple[Layout, ...]


@dataclass(frozen=True)
class Use:
    """One op that data has part in: what it was given, which of the model's tensors that is made of, what it made."""

    given: tuple[tuple[tuple[Layout, ...], frozenset[str] | None], ...]
    made: tuple[tuple[Layout, ...], ...]
    summed: tuple[tuple[Layout, frozenset[str] | None], ...]  # what products sum over, and the weights that read it


@dataclass
class Tracer:
    """Collects everything. It never touches the model."""

    equations: list[Equation] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    value_uses: list[ValueUse] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    said: dict[Place, Expr] = field(default_factory=dict)  # attributes that only say what weights are
    steps: list[Step] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)
    group_axis: Layout | None = None  # what the last op's `groups` counts
    repeats: tuple[Layout | None, ...] = ()  # what the last op's repeat counts count
    pads: tuple[Layout | None, ...] = ()  # what the last op's pad widths count
    fresh: dict[Atom, None] = field(default_factory=dict)  # axes that the present call made from nothing
    explained: list[Layout] = field(default_factory=list)  # layouts whose size the present call was given
    ops: int = 0
    module: str = ""
    listening: bool = True

    # tensors ---------------------------------------------------------------------------------------------

    def value(self, tensor: Tensor) -> Value:
        """What is known of a tensor; one never seen before is somebody's constant."""
        known = tensor.__dict__.get(_KEY)
        if known is None:
            reason = "a tensor made outside of the model's parameters and buffers"
            known = self.bind(tensor, Value([Atom(n, reason) for n in tensor.shape]))
        known.used = True
        return known

    def known(self, tensor: Any) -> Value | None:
        """The value of a tensor, if it has one that still fits it."""
        found = tensor.__dict__.get(_KEY) if isinstance(tensor, Tensor) else None
        return found if found is not None and len(found.dims) == tensor.ndim else None

    def bind(self, tensor: Tensor, value: Value) -> Value:
        value.boolean = tensor.dtype == torch.bool
        tensor.__dict__[_KEY] = value
        return value

    # ops -------------------------------------------------------------------------------------------------

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, seen: bool = True) -> None:
        """Apply the rule of one op that has just run; `seen`: the call that led to it, with its sizes, was."""
        self.ops += 1
        outs = out if isinstance(out, tuple | list) else (out,)
        tensors = [o for o in outs if isinstance(o, Tensor)]
        if not tensors and not _mutates(op):
            return
        flat = tensors_among((args, kwargs))
        values = [self.value(t) for t in flat]
        self.steps.append(step(op, args, kwargs, self.value))
        if not registry.creates(op) and all(v.constant() for v in values):
            reason = next((why_fixed(d) for v in values for d in v.dims), _op_name(op))
            for tensor in tensors:
                if self.known(tensor) is None or not any(tensor is t for t in flat):
                    self.bind(tensor, Value([Atom(n, reason) for n in tensor.shape]))
            return
        call = Call(self, op, tensors)
        found = registry.rule_for(op)
        if not seen and takes_sizes(op):
            call.opaque(*values, reason="called from where its sizes cannot be seen")
            result: Any = None
        elif found is None:
            self.unknown[str(op)] = self.unknown.get(str(op), 0) + 1
            call.opaque(*values, reason="no rule for this op")
            result = None
        else:
            rows = op in _TAKES_ROWS
            buffers = [kwargs[name] for name in registry.out_arguments(op) if name in kwargs]
            rest = {k: self._lift(v) for k, v in kwargs.items() if not any(v is buffer for buffer in buffers)}
            result = found(call, *self._lift(args, rows), **rest)
            for buffer, value in zip(buffers, result if isinstance(result, list | tuple) else [result], strict=False):
                for a, b in zip(self.value(buffer).dims, value.dims, strict=False):
                    if a.size == b.size:
                        unify(a, b)
        self._store(op, args, tensors, result, call)
        self._use(call, values, tensors)

    def run_function_rule(self, rule: Any, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Apply the rule of a torch function that has just run as a whole."""
        tensors = tensors_among(out if isinstance(out, tuple | list) else (out,))
        call = Call(self, func, tensors)
        call.name = func.__name__
        self.steps.append(step(func, args, kwargs, self.value))
        result = rule(call, *self._lift(args), **{k: self._lift(v) for k, v in kwargs.items()})
        for tensor, value in zip(tensors, result if isinstance(result, list) else [result], strict=True):
            if value.shape != tuple(tensor.shape):
                raise AssertionError(f"the rule of {call.name} made {value.shape}, it is {tuple(tensor.shape)}")
            self.bind(tensor, value)
        self._use(call, [self.value(t) for t in tensors_among((args, kwargs))], tensors)

    def _use(self, call: Call, values: list[Value], tensors: list[Tensor]) -> None:
        """Remember who reads and who makes what."""
        of = [value.storage.made_of for value in values]
        known = [names for names in of if names is not None]
        made = [self.value(tensor) for tensor in tensors]
        for value in made:
            value.storage.made_of = frozenset().union(*known) if len(known) == len(of) else None
        if len(known) < len(of) or call.summed:
            given = tuple((value.dims, names) for value, names in zip(values, of, strict=True))
            self.uses.append(Use(given, tuple(value.dims for value in made), tuple(call.summed)))

    def _lift(self, item: Any, rows: bool = False) -> Any:
        if isinstance(item, Tensor):
            value = self.value(item)
            if value.rows is not None and not rows:
                value.tie_rows()
            return value
        if isinstance(item, list | tuple):
            return [self._lift(i, rows) for i in item]
        return item

    def _store(self, op: Any, args: tuple[Any, ...], tensors: list[Tensor], result: Any, call: Call) -> None:
        results = list(result) if isinstance(result, list | tuple) else [result]
        if result is not None and len(results) < len(tensors):
            results += [None] * (len(tensors) - len(results))
        returns = op._schema.returns
        for i, tensor in enumerate(tensors):
            value = results[i] if result is not None else None
            if value is None:
                value = Value([call.fixed(n) for n in tensor.shape])
            info = returns[min(i, len(returns) - 1)].alias_info if returns else None
            if info is not None and args and isinstance(args[0], Tensor):
                base = self.value(args[0])
                if info.is_write:
                    base.storage.write(base, value)
                value.storage = base.storage
            if value.shape != tuple(tensor.shape):
                raise AssertionError(f"the rule of {op} made {value.shape}, the op {tuple(tensor.shape)}")
            self.bind(tensor, value)

    def cost(self, call: Call, *layouts: Layout, factor: int = 1) -> None:
        self.costs.append(Cost(self.module, call.name, factor, tuple(layouts)))

    # sizes -----------------------------------------------------------------------------------------------

    def shape_of(self, tensor: Tensor, shape: torch.Size) -> torch.Size:
        """The shape of a tensor, as sizes that remember their dimension."""
        value = self.known(tensor)
        if value is None:
            return shape
        return torch.Size([Size(n, Dim(dim), self) for n, dim in zip(shape, value.dims, strict=True)])

    def expect(self, size: Any, layout: Layout) -> None:
        """A size argument that must be the size of a layout, now and after any cut."""
        layout = resolve(layout)
        if not isinstance(size, int):
            if not isinstance(size, numbers.Integral):
                return
            size = int(size)
        if plain(size) == -1:
            return
        self.explained.append(layout)
        expr = expr_of(size)
        if constant(layout) and isinstance(expr, Lit):
            return
        if isinstance(expr, Dim) and resolve(expr.layout) is layout:
            return
        self.equations.append(Equation(expr, layout, self.where()))

    def expect_slice(self, x: Tensor, dim: int, start: Any, stop: Any, step: Any = None) -> None:
        """Bounds of a slice: the sizes of the pieces before, inside and after it."""
        value = self.known(x)
        if value is None or constant(resolve(value.dims[dim])):
            return
        layout = value.dims[dim]
        n = layout.size
        if step not in (None, 1):
            if start is not None and start >= 0:
                self.pin(start, "the phase of a stride")
            return
        begin = 0 if start is None else min(max(plain(start) + n if start < 0 else plain(start), 0), n)
        end = n if stop is None else min(max(plain(stop) + n if stop < 0 else plain(stop), begin), n)
        before, inside, after = pieces(layout, [begin, end - begin, n - end])
        if start is not None:
            if plain(start) >= 0:
                self.expect_clipped(start, before, n)
            else:
                self.expect_clipped(-start, Concat((inside, after)), n)
        if stop is not None:
            if plain(stop) >= 0:
                self.expect_clipped(stop, Concat((before, inside)), n)
            else:
                self.expect_clipped(-stop, after, n)

    def expect_position(self, x: Tensor, dim: int, index: Any) -> None:
        """A position by number: as many must stay before it (or after it, counted from the end)."""
        value = self.known(x)
        if value is None or constant(resolve(value.dims[dim])):
            return
        n = value.dims[dim].size
        at = plain(index) % n
        before, _, after = pieces(value.dims[dim], [at, 1, n - at - 1])
        if plain(index) >= 0:
            self.expect(index, before)
        else:
            self.expect(-index - 1, after)

    def expect_clipped(self, bound: int, layout: Layout, n: int) -> None:
        """A slice bound; one beyond the end means the end, wherever that is."""
        if plain(bound) == 0 or (plain(bound) > n and not isinstance(bound, Size)):
            return
        if plain(bound) > n:
            self.pin(bound, "a bound beyond the end")
            return
        self.expect(bound, layout)

    def pin(self, size: Any, why: str) -> None:
        """A size whose value must not change."""
        if isinstance(size, Size):
            where = self.where()
            self.equations.append(Equation(size.expr, Atom(plain(size), f"{why} ({where})"), where))

    def equal_counts(self, a: Layout, b: Layout, where: str) -> None:
        """Two layouts must keep equally many positions, whichever they are."""
        self.equations.append(Equation(Dim(a), b, where))

    def expect_same(self, layout: Layout, other: Layout) -> None:
        """As many positions as another layout has, whichever they are."""
        self.explained += [layout, other]
        if not (constant(resolve(layout)) and constant(resolve(other))) and resolve(layout) is not resolve(other):
            self.equal_counts(layout, other, self.where())

    def compare(self, layout: Layout, symbol: str, size: int, outcome: bool) -> None:
        """How a layout's size compares must stay as it is."""
        if not constant(resolve(layout)):
            self.comparisons.append(Comparison(symbol, Dim(layout), expr_of(size), outcome, self.where()))

    def multiple(self, layout: Layout, of: int) -> None:
        """A kernel takes only multiples of a number, if it was given one."""
        if not constant(resolve(layout)) and layout.size % of == 0:
            rest = Op("%", Dim(layout), Lit(of))
            self.comparisons.append(Comparison("==", rest, Lit(0), True, self.where()))

    def account(self, name: str, given: Any) -> None:
        """At the end of a call: a new axis that is neither explained nor one of what was given must stay whole."""
        open_ = [atom for axis in self.fresh for atom in free_atoms(axis)]
        if open_:
            known = (self.known(tensor) for tensor in tensors_among([given]))
            from_given = [dim for value in known if value is not None for dim in value.dims]
            accounted = {atom for layout in (*self.explained, *from_given) for atom in atoms(layout)}
            open_ = [atom for atom in open_ if atom not in accounted]
        self.fresh, self.explained = {}, []
        for atom in open_:
            fix(atom, f"{name}: where its size comes from is not known ({self.where()})")

    def on_value(self, expr: Expr, use: str) -> None:
        if self.listening:
            self.value_uses.append(ValueUse(expr, use, self.where()))

    def on_comparison(self, symbol: str, left: Expr, right: Expr, outcome: bool) -> None:
        if self.listening:
            self.comparisons.append(Comparison(symbol, left, right, outcome, self.where()))

    def where(self) -> str:
        """File and line of the innermost frame of the model's code that is neither torch's nor ours."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name == _CAPTURE and frame.f_code.co_name == "_run":
                return ""
            if not name.startswith((_OWN, _TORCH, "<")):
                return f"{Path(name).name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


def tensors_among(items: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found += tensors_among(item)
        elif isinstance(item, dict):
            found += tensors_among(item.values())
    return found


@cache
def takes_sizes(op: Any) -> bool:
    """Whether an argument of an op is a size, a position or a count."""
    return "SymInt" in str(op._schema)


def _mutates(op: Any) -> bool:
    return op._schema.is_mutable


def _op_name(op: Any) -> str:
    return str(op).removeprefix("aten.").partition(".")[0]
