"""Models that other arguments make take other ways, which the example leaves at their defaults."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beyond.harness import Case, floats, whole


class Distributional(nn.Module):
    """C51: values are means over atoms; with `log` the atoms themselves come out."""

    def __init__(self, atoms: int = 6, actions: int = 3) -> None:
        super().__init__()
        self.atoms, self.actions = atoms, actions
        self.body, self.head = nn.Linear(4, 10), nn.Linear(10, actions * atoms)
        self.register_buffer("support", torch.linspace(-1, 1, atoms))

    def forward(self, x: Tensor, log: bool = False) -> Tensor:
        q = self.head(F.relu(self.body(x))).view(-1, self.actions, self.atoms)
        return q.log_softmax(2) if log else (q.softmax(2) * self.support).sum(2)


class Tagger(nn.Module):
    """A conditional random field: with tags the likelihood of these, which picks from scores and transitions."""

    def __init__(self, d: int = 8, tags: int = 4) -> None:
        super().__init__()
        self.words, self.mix, self.scores = nn.Embedding(9, d), nn.Linear(d, 12), nn.Linear(12, tags)
        self.moves = nn.Parameter(torch.randn(tags, tags))

    def forward(self, tokens: Tensor, tags: Tensor | None = None) -> Tensor:
        scores = self.scores(F.relu(self.mix(self.words(tokens))))
        total = scores[:, 0]
        for t in range(1, tokens.shape[1]):
            total = torch.logsumexp(total.unsqueeze(2) + self.moves + scores[:, t].unsqueeze(1), 1)
        total = total.logsumexp(1)
        if tags is None:
            return total
        picked = scores.gather(2, tags.unsqueeze(2)).squeeze(2).sum(1)
        return total - picked - self.moves[tags[:, :-1], tags[:, 1:]].sum(1)


class Conditioned(nn.Module):
    """Without a context it makes one of zeros, as wide as one that is given."""

    def __init__(self, d: int = 8, context: int = 6) -> None:
        super().__init__()
        self.enter, self.scale, self.out = nn.Linear(3, d), nn.Linear(context, 2 * d), nn.Linear(d, 2)
        self.context = context

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if context is None:
            context = x.new_zeros(x.shape[0], self.context)
        gain, bias = self.scale(context).chunk(2, -1)
        return self.out(F.relu(self.enter(x) * (1 + gain) + bias))


class Continued(nn.Module):
    """A recurrence that may begin with a state of the caller's; it is not put out."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.d = d
        self.read, self.turn, self.mix, self.out = nn.Linear(3, d), nn.Linear(d, d), nn.Linear(d, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        h = torch.zeros(x.shape[0], self.d, dtype=x.dtype) if state is None else state
        for t in range(x.shape[1]):
            h = torch.tanh(self.read(x[:, t]) + self.turn(h))
        return self.out(F.relu(self.mix(h)))


class Queried(nn.Module):
    """Learned queries, or others: who gives those knows how wide the model is."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.queries, self.pairs, self.out = nn.Parameter(torch.randn(4, d)), nn.Linear(3, 2 * d), nn.Linear(d, 2)

    def forward(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        q = self.queries.expand(len(x), -1, -1) if queries is None else queries
        k, v = self.pairs(x).chunk(2, -1)
        return self.out((q @ k.mT).softmax(-1) @ v)


class Modulated(nn.Module):
    """SIREN, with a code that only a layer of its own reads."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.a, self.b, self.out, self.code = nn.Linear(2, d), nn.Linear(d, d), nn.Linear(d, 3), nn.Linear(5, d)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        for layer in (self.a, self.b):
            x = torch.sin(3 * layer(x))
            if z is not None:
                x = x * self.code(z)
        return self.out(x)


class Spread(nn.Module):
    """BatchEnsemble: a mean over members, and a variance, which takes two of them."""

    def __init__(self, members: int = 2) -> None:
        super().__init__()
        self.members = members
        self.a, self.out = nn.Linear(4, 10), nn.Linear(10, 2)
        self.before, self.after = nn.Parameter(torch.randn(members, 4)), nn.Parameter(torch.randn(members, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n = x.shape[0]
        before, after = (p.repeat_interleave(n, 0) for p in (self.before, self.after))
        y = self.out(F.relu(self.a(x.repeat(self.members, 1) * before) * after)).view(self.members, n, -1)
        return y.mean(0), y.var(0)


class TokenMixer(nn.Module):
    """gMLP: a convolution over tokens with a kernel of one, so that features pass it one by one."""

    def __init__(self, tokens: int = 5, d: int = 8) -> None:
        super().__init__()
        self.enter, self.up, self.down, self.out = nn.Linear(3, d), nn.Linear(d, 12), nn.Linear(6, d), nn.Linear(d, 2)
        self.mix, self.plain = nn.Conv1d(tokens, tokens, 1), nn.Conv1d(tokens, 4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        a, b = F.gelu(self.up(x)).chunk(2, -1)
        return self.out(self.plain(x + self.down(a * self.mix(b))))


CASES = (
    Case("an argument asks for atoms", Distributional, lambda: [floats(3, 4), (floats(2, 4), True)]),
    Case("tags left out", Tagger, lambda: [whole(9, 2, 5), (whole(9, 3, 4), whole(4, 3, 4))]),
    Case("a context left out", Conditioned, lambda: [floats(3, 3), (floats(2, 3), floats(2, 6))]),
    Case("a state left out", Continued, lambda: [floats(2, 3, 3), (floats(2, 2, 3), floats(2, 8, seed=3))]),
    Case("queries left out", Queried, lambda: [floats(2, 5, 3), floats(1, 4, 3)]),
    Case("a code left out", Modulated, lambda: [floats(5, 2), (floats(3, 2), floats(3, 5))]),
    Case("a variance over members", Spread, lambda: [floats(3, 4), floats(5, 4)]),
    Case("kernels of one over tokens", TokenMixer, lambda: [floats(2, 5, 3), floats(1, 5, 3)]),
)
