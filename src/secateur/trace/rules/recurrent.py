"""LSTM, GRU and plain RNN, seen as a whole: layers, directions, projections, packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from secateur.axes import Atom, Concat, Layout, Product, hint, resolve, unify
from secateur.trace.registry import function_rule, rule
from secateur.trace.value import Call, Value

aten = torch.ops.aten
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@function_rule(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def recurrent(call: Call, x: Value, *args: Any) -> list[Value]:
    """h[t] = f(W_ih x[t] + b_ih + W_hh h[t-1] + b_hh), gate by gate; W is (gates × hidden, …)."""
    packed = isinstance(args[0], Value) and isinstance(args[2], list)
    batch_sizes, (states, weights, biased, layers, _, _, both) = (
        (args[0], args[1:8]) if packed else (None, args[:7])
    )
    batch_first = not packed and args[7]
    initial = states if isinstance(states, list) else [states]
    directions = 2 if both else 1
    per_cell = len(weights) // (layers * directions)
    steps = x.dims[:1] if packed else x.dims[:2] if len(x.dims) == 3 else x.dims[:1]
    features: Layout = x.dims[-1]
    outs: list[Layout] = []
    cells: list[Layout] = []
    for layer in range(layers):
        ends = []
        for d in range(directions):
            start = (layer * directions + d) * per_cell
            out, cell = _cell(call, features, steps, weights[start : start + per_cell], biased)
            ends.append(out)
            cells.append(cell)
        outs += ends
        features = resolve(Concat(tuple(ends)))
    clean = all(v.is_zero(len(v.dims) - 1) for v in initial)
    for state, rows in zip(initial, (outs, cells), strict=False):
        _tie_state(call, state, rows)
    batch = [call.fixed(n) for n in call.outs[1][1:-1]]
    if not packed and len(x.dims) == 3:
        batch = [x.dims[0 if batch_first else 1]]
    hidden = [_state(call, rows, batch, clean) for rows in (outs, cells)[: len(call.outs) - 1]]
    return [Value([*x.dims[:-1], features], [*(False for _ in x.dims[:-1]), clean]), *hidden]


def _cell(
    call: Call, features: Layout, steps: Sequence[Layout], weights: Sequence[Value], biased: bool
) -> tuple[Layout, Layout]:
    """One layer in one direction: what it puts out, and its cell state."""
    gates = _GATES[call.name]
    w_ih, w_hh = weights[:2]
    hidden: Layout = Atom(w_ih.dims[0].size // gates)
    rows = Product((call.fixed(gates, "gates"), hidden))
    for weight in weights[: 4 if biased else 2]:
        unify(weight.dims[0], rows)
    unify(w_ih.dims[1], features)
    hint(hidden, "hidden")
    out = hidden
    if len(weights) in (3, 5):
        projection = weights[-1]
        unify(projection.dims[1], hidden)
        out = projection.dims[0]
        hint(out, "projection")
        call.tracer.cost(call, *steps, hidden, out)
    unify(w_hh.dims[1], out)
    call.tracer.cost(call, *steps, w_ih.dims[0], w_ih.dims[1])
    call.tracer.cost(call, *steps, w_hh.dims[0], w_hh.dims[1])
    return resolve(out), resolve(hidden)


def _tie_state(call: Call, state: Value, rows: Sequence[Layout]) -> None:
    """An initial state has one width for all layers; one with a content of its own ties their positions too."""
    for row in rows:
        if state.alike:
            call.tracer.equal_counts(state.dims[-1], row, "all layers and directions share one width")
        else:
            unify(state.dims[-1], row)


def _state(call: Call, rows: list[Layout], batch: Sequence[Layout], clean: bool) -> Value:
    """A final state: a row for each layer and direction, tied together only when it is used as a whole."""
    if len(rows) == 1:
        width: Layout = rows[0]
        tied = None
    else:
        width = Atom(rows[0].size)
        tied = rows
    value = Value([call.fixed(len(rows), "layers × directions"), *batch, width], [True] + [False] * len(batch) + [clean])
    value.rows = tied
    return value


@rule(aten._pack_padded_sequence.default)
def pack(call: Call, x: Value, lengths: Value, batch_first: bool) -> list[Value]:
    """The valid steps of all sequences, one after the other."""
    for dim in x.dims[:2]:
        call.fix(dim, "steps")
    first = Value([call.fixed(call.shape[0], "steps"), *x.dims[2:]], [False, *x.zero[2:]])
    return [first, Value([call.fixed(n) for n in call.outs[1]])]


@rule(aten._pad_packed_sequence.default)
def pad(call: Call, x: Value, batch_sizes: Value, batch_first: bool, value: Any, total: int) -> list[Value]:
    """Sequences of equal length again."""
    first = Value([*(call.fixed(n, "steps") for n in call.shape[:2]), *x.dims[1:]], [False, False, *x.zero[1:]])
    return [first, Value([call.fixed(n) for n in call.outs[1]])]
