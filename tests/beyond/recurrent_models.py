"""Recurrences: cells written by hand, states that are made, learned, passed or kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from beyond.harness import Case, Do, floats


class HandRNN(nn.Module):
    def __init__(self, d: int = 4, hidden: int = 12) -> None:
        super().__init__()
        self.hidden = hidden
        self.i, self.r, self.out = nn.Linear(d, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], self.hidden)
        for t in range(x.shape[1]):
            h = torch.tanh(self.i(x[:, t]) + self.r(h))
        return self.out(h)


class HandGRU(nn.Module):
    """A gated cell; the state is kept as a list of steps."""

    def __init__(self, d: int = 4, hidden: int = 10) -> None:
        super().__init__()
        self.size = hidden
        self.gates = nn.Linear(d + hidden, 2 * hidden)
        self.candidate = nn.Linear(d + hidden, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        states = [x.new_zeros(x.size(0), self.size)]
        for step in x.unbind(1):
            h = states[-1]
            reset, update = torch.sigmoid(self.gates(torch.cat([step, h], -1))).split(self.size, -1)
            new = torch.tanh(self.candidate(torch.cat([step, reset * h], -1)))
            states.append(torch.lerp(h, new, update))
        return self.out(torch.stack(states[1:], 1))


class HandLSTM(nn.Module):
    def __init__(self, d: int = 4, hidden: int = 8) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(d, 4 * hidden) * 0.3)
        self.u = nn.Parameter(torch.randn(hidden, 4 * hidden) * 0.3)
        self.b = nn.Parameter(torch.zeros(4 * hidden))
        self.out = nn.Linear(hidden, 2)
        self.h = hidden

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Tensor:
        b = x.size(0)
        h, c = state or (torch.zeros(b, self.h), torch.zeros(b, self.h))
        for t in range(x.size(1)):
            i, f, g, o = (x[:, t] @ self.w + h @ self.u + self.b).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.out(h)


class LearnedStart(nn.Module):
    """`LSTMCell` from a learned state."""

    def __init__(self, d: int = 4, hidden: int = 10) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(d, hidden)
        self.h0, self.c0 = nn.Parameter(torch.zeros(hidden)), nn.Parameter(torch.zeros(hidden))
        self.head = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, c = (s.expand(x.size(0), -1) for s in (self.h0, self.c0))
        out = []
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t], (h, c))
            out.append(self.head(h))
        return torch.stack(out, 1)


class ConvLSTM(nn.Module):
    def __init__(self, c: int = 2, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(c + hidden, 4 * hidden, 3, padding=1)
        self.out = nn.Conv2d(hidden, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _, height, width = x.shape
        h = x.new_zeros(b, self.hidden, height, width)
        c = torch.zeros_like(h)
        for k in range(t):
            i, f, o, g = torch.split(self.gates(torch.cat([x[:, k], h], dim=1)), self.hidden, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.out(h)


class KeepsState(nn.Module):
    """The state stays on the module between calls until it is reset, or the batch has another size."""

    def __init__(self, d: int = 3, hidden: int = 10) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(d, hidden), nn.Linear(hidden, 2)
        self.hidden = hidden
        self.state: Tensor | None = None

    def reset(self) -> None:
        self.state = None

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None or self.state.shape[0] != x.shape[0]:
            self.state = torch.zeros(x.shape[0], self.hidden)
        self.state = self.cell(x, self.state.detach())
        return self.out(self.state)


class StateInABuffer(nn.Module):
    """A leaky memory in a buffer, written in place while the model runs."""

    def __init__(self, d: int = 4, hidden: int = 8) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Linear(d, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 2)
        self.register_buffer("memory", torch.zeros(hidden))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.embed(x) + self.mix(self.memory.clone()))
        with torch.no_grad():
            self.memory.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.out(h)


class Passed(nn.Module):
    """Torch's own LSTM whose state the caller passes, and gets back."""

    def __init__(self, d: int = 4, hidden: int = 8) -> None:
        super().__init__()
        self.rnn = nn.LSTM(d, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Tensor:
        y, state = self.rnn(x, state)
        y, _ = self.rnn(x.flip(1), state)
        return self.out(y)


class GivesState(Passed):
    """The caller gets the state, and gives it back for the next piece."""

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.rnn(x, state)
        return self.out(torch.tanh(self.mix(y))), state

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(8, 12), nn.Linear(12, 2)


class Packed(nn.Module):
    """Embedding, a bidirectional GRU on packed sequences, the last states joined."""

    def __init__(self, d: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(d, 8)
        self.rnn = nn.GRU(8, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        _, last = self.rnn(packed)
        return self.out(torch.cat([last[0], last[1]], -1))


class TakesPacked(nn.Module):
    """A PackedSequence comes in."""

    def __init__(self, d: int = 4, hidden: int = 8) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(d, hidden), nn.Linear(hidden, 2)

    def forward(self, packed: PackedSequence) -> Tensor:
        y, _ = self.rnn(packed)
        padded, _lengths = pad_packed_sequence(y)
        return self.out(F.relu(padded))


class Scan(nn.Module):
    """A diagonal state space, scanned step by step: h = a h + b x, y = c h."""

    def __init__(self, d: int = 8, n: int = 4) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 2 * d), nn.Linear(d, 2)
        self.dt, self.bc = nn.Linear(d, d), nn.Linear(d, 2 * n)
        self.a = nn.Parameter(torch.randn(d, n))
        self.skip = nn.Parameter(torch.ones(d))
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.into(x).chunk(2, -1)
        dt = F.softplus(self.dt(u))
        b, c = self.bc(u).split([self.n, self.n], dim=-1)
        h = torch.zeros(u.shape[0], u.shape[-1], self.n)
        ys = []
        for t in range(u.shape[1]):
            decay = torch.exp(-dt[:, t, :, None] * self.a.exp())
            h = decay * h + (dt[:, t] * u[:, t])[..., None] * b[:, t, None]
            ys.append(torch.einsum("bdn,bn->bd", h, c[:, t]))
        y = torch.stack(ys, 1) + u * self.skip
        return self.out(y * F.silu(z))


def series(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [floats(*size, seed=i) for i, size in enumerate(sizes)]


def packed(*lengths: int) -> PackedSequence:
    return pack_padded_sequence(floats(max(lengths), len(lengths), 4), torch.tensor(lengths), enforce_sorted=False)


def padded(*lengths: int) -> tuple[Tensor, Tensor]:
    return floats(len(lengths), max(lengths), 4), torch.tensor(lengths)


class TakesSteps(nn.Module):
    """Each step is an argument of its own."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.into, self.again, self.out = nn.Linear(4, d), nn.Linear(d, d), nn.Linear(d, 2)
        self.width = d

    def forward(self, *steps: Tensor) -> Tensor:
        h = steps[0].new_zeros(steps[0].shape[0], self.width)
        for x in steps:
            h = torch.tanh(self.into(x) + self.again(h))
        return self.out(h)


CASES = (
    Case("steps as arguments", TakesSteps, lambda: [(floats(2, 4),), (floats(1, 4),) * 4]),
    Case("RNN by hand, one step", HandRNN, lambda: series((2, 1, 4), (3, 5, 4), (1, 2, 4))),
    Case("RNN by hand, steps", HandRNN, lambda: series((2, 3, 4), (3, 5, 4), (2, 1, 4))),
    Case("GRU by hand, one step", HandGRU, lambda: series((2, 1, 4), (3, 4, 4))),
    Case("LSTM by hand, one step", HandLSTM, lambda: series((2, 1, 4), (3, 4, 4))),
    Case("LSTM cell, learned start, one step", LearnedStart, lambda: series((2, 1, 4), (3, 4, 4))),
    Case("ConvLSTM, one step", ConvLSTM, lambda: series((1, 1, 2, 5, 5), (2, 3, 2, 4, 6))),
    Case("ConvLSTM", ConvLSTM, lambda: series((1, 2, 2, 5, 5), (2, 3, 2, 4, 6), (1, 1, 2, 3, 3))),
    Case(
        "state kept on the module",
        KeepsState,
        lambda: [*series((2, 3), (2, 3), (4, 3), (4, 3)), Do(lambda m, x: (m.reset(), m(x))[1], floats(4, 3, seed=9))],
    ),
    Case("state in a buffer", StateInABuffer, lambda: series((3, 4), (5, 4), (2, 4))),
    Case("LSTM, state passed on", Passed, lambda: series((2, 3, 4), (3, 5, 4))),
    Case(
        "LSTM, state given to the caller",
        GivesState,
        lambda: [
            floats(2, 3, 4),
            Do(lambda m, x: m(x, m(x)[1]), floats(3, 2, 4)),
            (floats(1, 2, 4), [floats(2, 1, 8)] * 2),
        ],
    ),
    Case("GRU on packed sequences", Packed, lambda: [padded(4, 2), padded(3, 5, 1)]),
    Case("packed sequence as input", TakesPacked, lambda: [(packed(3, 2),), (packed(1, 4, 2),)]),
    Case("state-space scan", Scan, lambda: series((2, 3, 3), (1, 5, 3), (3, 1, 3))),
)
