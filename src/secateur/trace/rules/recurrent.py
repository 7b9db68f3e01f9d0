"""LSTM, GRU and plain RNN, seen as a whole: layers, directions, projections, packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from secateur.axes import Atom, Concat, Layout, Product, hint, resolve, unify
from secateur.trace.registry import function_rule, rule
from secateur.trace.sizes import Dim
from secateur.trace.value import Call, Value

aten = torch.ops.aten
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True)
class _Cell:
    """One layer in one direction: what it puts out, its cell state, and whether these are zero where removed."""

    out: Layout
    hidden: Layout
    out_zero: bool
    hidden_zero: bool


@function_rule(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
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
        ends = [_cell(call, features, zero, x.dims[:-1], weights[at : at + per_cell], biased, clean) for at in starts]
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
    steps: Sequence[Layout],
    weights: Sequence[Value],
    biased: bool,
    clean: bool,
) -> _Cell:
    """One layer in one direction; `zero`: its features are zero where removed, `clean`: its initial states are."""
    gates = _GATES[call.name]
    made = weights[: 4 if biased else 2]
    w_ih, w_hh = made[:2]
    hidden: Layout = Atom(w_ih.dims[0].size // gates)
    rows = Product((call.fixed(gates, "gates"), hidden))
    for weight in made:
        unify(weight.dims[0], rows)
    call.contract(Value([features], zero), 0, w_ih, 1)
    hint(hidden, "hidden")
    hidden_zero = clean and all(weight.is_zero(0) for weight in made)
    out, out_zero = hidden, hidden_zero
    if len(weights) > len(made):
        projection = weights[-1]
        call.contract(Value([hidden], hidden_zero), 0, projection, 1)
        out, out_zero = projection.dims[0], clean and projection.is_zero(0)
        hint(out, "projection")
        call.tracer.on_comparison("!=", Dim(out), Dim(hidden), True)  # equal widths mean that there is none
        call.tracer.cost(call, *steps, hidden, out)
    call.contract(Value([out], out_zero), 0, w_hh, 1)
    call.tracer.cost(call, *steps, w_ih.dims[0], w_ih.dims[1])
    call.tracer.cost(call, *steps, w_hh.dims[0], w_hh.dims[1])
    return _Cell(resolve(out), resolve(hidden), out_zero, hidden_zero)


def _tie_state(call: Call, state: Value, rows: Sequence[Layout]) -> None:
    """An initial state has one width for all layers; one with a content of its own ties their positions too."""
    unify(state.dims[-1], rows[0])
    for row in rows[1:]:
        if state.alike:
            call.tracer.equal_counts(rows[0], row, "all layers and directions share one width")
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


@rule(aten._pack_padded_sequence.default)
def pack(call: Call, x: Value, lengths: Value, batch_first: bool) -> list[Value]:
    """The valid steps of all sequences, one after the other."""
    call.opaque(Value(x.dims[:2]), lengths, reason="steps")
    first = Value([call.fixed(call.shape[0], "steps"), *x.dims[2:]], [False, *x.zero[2:]])
    return [first, Value([call.fixed(n) for n in call.outs[1]])]


@rule(aten._pad_packed_sequence.default)
def pad(call: Call, x: Value, batch_sizes: Value, batch_first: bool, value: Any, total: int) -> list[Value]:
    """Sequences of equal length again."""
    call.opaque(Value(x.dims[:1]), batch_sizes, reason="steps")
    first = Value([*(call.fixed(n, "steps") for n in call.shape[:2]), *x.dims[1:]], [False, False, *x.zero[1:]])
    return [first, Value([call.fixed(n) for n in call.outs[1]])]
