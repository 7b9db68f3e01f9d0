"""LSTM, GRU and RNN written out step by step, in ops that anybody can follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _lstm(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.unflatten(-1, (4, -1)).unbind(-2)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _steps(
    kind: str, x: Sequence[Tensor], state: tuple[Tensor, ...], weights: Sequence[Tensor], biased: bool
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
        if kind == "lstm":
            h, cell = _lstm(given + kept, state[1][:size])
            h = h if projection is None else h @ projection.t()
            new: tuple[Tensor, ...] = (h, cell)
        elif kind == "gru":
            (r1, z1, n1), (r2, z2, n2) = (t.unflatten(-1, (3, -1)).unbind(-2) for t in (given, kept))
            r, z = (r1 + r2).sigmoid(), (z1 + z2).sigmoid()
            h = (1 - z) * (n1 + r * n2).tanh() + z * h
            new = (h,)
        else:
            h = (given + kept).tanh() if kind == "rnn_tanh" else (given + kept).relu()
            new = (h,)
        outs.append(h)
        state = tuple(torch.cat([n, s[size:]]) for n, s in zip(new, state, strict=True))
    return outs, state


def _backwards(kind: str, x: Sequence[Tensor], state: Any, weights: Any, biased: bool) -> Any:
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


def _run(kind: str, x: list[Tensor], states: Any, weights: Any, biased: bool, layers: int, both: bool) -> Any:
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


def _recurrent(kind: str) -> Callable[..., Any]:
    def function(x: Tensor, *args: Any) -> Any:
        if isinstance(args[0], Tensor) and isinstance(args[2], list | tuple):  # packed
            sizes, states, weights, biased, layers, _, _, both = args[:8]
            steps = list(x.split(sizes.tolist()))
            states = states if isinstance(states, list | tuple) else (states,)
            outs, finals = _run(kind, steps, states, weights, biased, layers, both)
            return (torch.cat(outs), *finals)
        states, weights, biased, layers, _, _, both, batch_first = args[:8]
        states = states if isinstance(states, list | tuple) else (states,)
        single = x.dim() == 2
        if single:
            x, states = x.unsqueeze(1), [s.unsqueeze(1) for s in states]
        elif batch_first:
            x = x.transpose(0, 1)
        outs, finals = _run(kind, list(x.unbind(0)), states, weights, biased, layers, both)
        out = torch.stack(outs)
        if single:
            return (out.squeeze(1), *(f.squeeze(1) for f in finals))
        return (out.transpose(0, 1) if batch_first else out, *finals)

    return function


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _recurrent("lstm"),
    torch.gru: _recurrent("gru"),
    torch.rnn_tanh: _recurrent("rnn_tanh"),
    torch.rnn_relu: _recurrent("rnn_relu"),
}
