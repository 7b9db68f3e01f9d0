"""LSTM, GRU and plain RNN, seen as a whole: layers, directions, projections, packed sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.axes import Atom, Concat, Inherent, Layout, Product, hint, resolve, unify
from secateur.compat import aten
from secateur.ops.record import function, op
from secateur.ops.value import Call, Value

_EACH_GATE = Inherent("one row for each gate of a unit")
_GATES = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}


@dataclass(frozen=True)
class _Cell:
    """One layer in one direction: what it puts out, its cell state, and whether these are zero where removed."""

    out: Layout
    hidden: Layout
    out_zero: bool
    hidden_zero: bool


@function(*_GATES)
def recurrent(call: Call, x: Value, *args: Any) -> list[Value]:
    """h[t] = f(W_ih x[t] + b_ih + W_hh h[t-1] + b_hh), gate by gate; W is (gates × hidden, …)."""
    packed = isinstance(args[0], Value) and isinstance(args[2], list)
    states, weights, biased, layers, _, _, both = args[1:8] if packed else args[:7]
    initial = states if isinstance(states, list) else [states]
    batch = _batch(call, x, initial, args[0] if packed else None, batch_first=not packed and args[7])
    directions = 2 if both else 1
    per_cell = len(weights) // (layers * directions)
    clean = all(state.is_zero(-1) for state in initial)
    features, zero = x.dims[-1], x.is_zero(-1)
    cells: list[_Cell] = []
    for layer in range(layers):
        starts = [(layer * directions + d) * per_cell for d in range(directions)]
        ends = [_cell(call, features, zero, weights[at : at + per_cell], biased, clean) for at in starts]
        cells += ends
        features = resolve(Concat(tuple(end.out for end in ends)))
        zero = all(end.out_zero for end in ends)
    outs, inner = [cell.out for cell in cells], [cell.hidden for cell in cells]
    flags = all(cell.out_zero for cell in cells), all(cell.hidden_zero for cell in cells)
    for state, rows in zip(initial, (outs, inner), strict=False):
        _tie_state(call, state, rows)
    finals = list(zip((outs, inner), flags, strict=True))[: len(call.outs) - 1]
    hidden = [_state(call, rows, batch, flag) for rows, flag in finals]
    return [Value([*x.dims[:-1], features], [*(False for _ in x.dims[:-1]), zero]), *hidden]


@recurrent.cost
def _(out: Sequence[Value], x: Value, *args: Any) -> Iterator[tuple[Layout, ...]]:
    """Every weight matrix, at every step."""
    weights = args[2] if isinstance(args[2], list) else args[1]
    for weight in weights:
        if len(weight.dims) == 2:
            yield (*x.dims[:-1], *weight.dims)


def _batch(
    call: Call, x: Value, initial: Sequence[Value], batch_sizes: Value | None, *, batch_first: bool
) -> list[Layout]:
    """The batch dimension; steps depend on the ones before, so they stay."""
    for state in initial:
        call.fix(state.dims[0], "layers × directions")
    if batch_sizes is not None:
        call.opaque(Value(x.dims[:1]), batch_sizes, *(Value(s.dims[1:-1]) for s in initial), reason="steps")
        return [call.fixed(n) for n in call.outs[1][1:-1]]
    at = 0 if batch_first else 1
    call.fix(x.dims[1 - at], "steps")
    for state in initial:
        unify(x.dims[at], state.dims[1])
    return [x.dims[at]]


def _cell(
    call: Call,
    features: Layout,
    zero: bool,
    weights: Sequence[Value],
    biased: bool,
    clean: bool,
) -> _Cell:
    """One layer in one direction; `zero`: its features are zero where removed, `clean`: its initial states are."""
    gates = _GATES[call.op]
    made = weights[: 4 if biased else 2]
    w_ih, w_hh = made[:2]
    hidden: Layout = Atom(w_ih.dims[0].size // gates)
    rows = Product((Atom(gates, _EACH_GATE), hidden))
    for weight in made:
        unify(weight.dims[0], rows)
    call.contract((Value([features], zero), 0), (w_ih, 1))
    hint(hidden, "units")
    hidden_zero = clean and all(weight.is_zero(0) for weight in made)
    out, out_zero = hidden, hidden_zero
    if len(weights) > len(made):
        projection = weights[-1]
        call.contract((Value([hidden], hidden_zero), 0), (projection, 1))
        out, out_zero = projection.dims[0], clean and projection.is_zero(0)
        hint(out, "projection")
        call.sizes.compare(out, "!=", hidden)  # equal widths mean that there is none
    call.contract((Value([out], out_zero), 0), (w_hh, 1))
    return _Cell(resolve(out), resolve(hidden), out_zero, hidden_zero)


def _tie_state(call: Call, state: Value, rows: Sequence[Layout]) -> None:
    """An initial state has one width for all layers; one with a content of its own ties their positions too."""
    unify(state.dims[-1], rows[0])
    for row in rows[1:]:
        if state.alike:
            call.sizes.equal_counts(rows[0], row, "all layers and directions share one width")
        else:
            unify(rows[0], row)


def _state(call: Call, rows: list[Layout], batch: Sequence[Layout], clean: bool) -> Value:
    """A final state: a row for each layer and direction, tied together only when it is used as a whole."""
    if len(rows) == 1:
        width: Layout = rows[0]
        tied = None
    else:
        width = Atom(rows[0].size)
        tied = rows
    value = Value(
        [call.fixed(len(rows), "layers × directions"), *batch, width], [True] + [False] * len(batch) + [clean]
    )
    value.rows = tied
    return value


@op(aten._pack_padded_sequence.default, called="_pack_padded_sequence")
def pack(call: Call, x: Value, lengths: Value, batch_first: bool) -> list[Value]:
    """The valid steps of all sequences, one after the other."""
    call.opaque(Value(x.dims[:2]), lengths, reason="steps")
    first = Value([call.fixed(call.shape[0], "steps"), *x.dims[2:]], [False, *x.zero[2:]])
    return [first, Value([call.fixed(n) for n in call.outs[1]])]


@op(aten._pad_packed_sequence.default, called="_pad_packed_sequence")
def pad(call: Call, x: Value, batch_sizes: Value, batch_first: bool, value: Any, total: int) -> list[Value]:
    """Sequences of equal length again."""
    call.opaque(Value(x.dims[:1]), batch_sizes, reason="steps")
    first = Value([*(call.fixed(n, "steps") for n in call.shape[:2]), *x.dims[1:]], [False, False, *x.zero[1:]])
    return [first, Value([call.fixed(n) for n in call.outs[1]])]


# step by step --------------------------------------------------------------------------------------------------


def _lstm(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.unflatten(-1, (4, -1)).unbind(-2)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _steps(
    kind: Any, x: Sequence[Tensor], state: tuple[Tensor, ...], weights: Sequence[Tensor], biased: bool
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """One layer in one direction over a sequence of (batch, features)."""
    w_ih, w_hh = weights[0], weights[1]
    b_ih, b_hh = (weights[2], weights[3]) if biased else (None, None)
    projection = weights[-1] if len(weights) in (3, 5) else None
    outs = []
    for step in x:
        size = step.size(0)
        h = state[0][:size]
        given = torch.nn.functional.linear(step, w_ih, b_ih)
        kept = torch.nn.functional.linear(h, w_hh, b_hh)
        if kind is torch.lstm:
            h, cell = _lstm(given + kept, state[1][:size])
            h = h if projection is None else h @ projection.t()
            new: tuple[Tensor, ...] = (h, cell)
        elif kind is torch.gru:
            (r1, z1, n1), (r2, z2, n2) = (t.unflatten(-1, (3, -1)).unbind(-2) for t in (given, kept))
            r, z = (r1 + r2).sigmoid(), (z1 + z2).sigmoid()
            h = (1 - z) * (n1 + r * n2).tanh() + z * h
            new = (h,)
        else:
            h = (given + kept).tanh() if kind is torch.rnn_tanh else (given + kept).relu()
            new = (h,)
        outs.append(h)
        state = tuple(torch.cat([n, s[size:]]) for n, s in zip(new, state, strict=True))
    return outs, state


def _backwards(kind: Any, x: Sequence[Tensor], state: Any, weights: Any, biased: bool) -> Any:
    """The same from the last step to the first; a sequence that starts later keeps its initial state until then."""
    outs: list[Tensor] = []
    full = state
    current = tuple(s[: x[-1].size(0)] for s in full)
    for step in reversed(x):
        size = step.size(0)
        if size > current[0].size(0):
            current = tuple(torch.cat([c, s[c.size(0) : size]]) for c, s in zip(current, full, strict=True))
        out, current = _steps(kind, [step], current, weights, biased)
        outs.append(out[0])
    return outs[::-1], current


def _run(kind: Any, x: list[Tensor], states: Any, weights: Any, biased: bool, layers: int, both: bool) -> Any:
    directions = 2 if both else 1
    per = len(weights) // (layers * directions)
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        sides = []
        for d in range(directions):
            at = layer * directions + d
            chosen = weights[at * per : (at + 1) * per]
            walk = _backwards if d else _steps
            out, final = walk(kind, x, tuple(s[at] for s in states), chosen, biased)
            sides.append(out)
            finals.append(final)
        x = [torch.cat(parts, -1) for parts in zip(*sides, strict=True)] if both else sides[0]
    return x, [torch.stack(rows) for rows in zip(*finals, strict=True)]


@recurrent.absent
def _(op: Any, x: Tensor, *args: Any) -> Any:
    """Written out step by step, in ops that skip what is absent."""
    if isinstance(args[0], Tensor) and isinstance(args[2], list | tuple):  # packed
        sizes, states, weights, biased, layers, _, _, both = args[:8]
        steps = list(x.split(sizes.tolist()))
        states = states if isinstance(states, list | tuple) else (states,)
        outs, finals = _run(op, steps, states, weights, biased, layers, both)
        return (torch.cat(outs), *finals)
    states, weights, biased, layers, _, _, both, batch_first = args[:8]
    states = states if isinstance(states, list | tuple) else (states,)
    single = x.dim() == 2
    if single:
        x, states = x.unsqueeze(1), [s.unsqueeze(1) for s in states]
    elif batch_first:
        x = x.transpose(0, 1)
    outs, finals = _run(op, list(x.unbind(0)), states, weights, biased, layers, both)
    out = torch.stack(outs)
    if single:
        return (out.squeeze(1), *(f.squeeze(1) for f in finals))
    return (out.transpose(0, 1) if batch_first else out, *finals)
