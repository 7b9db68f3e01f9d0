"""Code that only later calls reach: the rest of a table, other methods, branches that other arguments take."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from beyond.harness import Case, Do, floats, whole

# tables ---------------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Learned positions for the longest input."""

    def __init__(self, width: int = 8, longest: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, width), nn.Linear(width, 2)
        self.positions = nn.Parameter(torch.randn(longest, width))

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        return self.head(torch.relu(self.embed(x) + self.positions[start : start + x.shape[1]]))


class FromTheEnd(Positions):
    """Counted from the last one."""

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        return self.head(torch.relu(self.embed(x) + self.positions[-x.shape[1] :]))


class RelativeBiases(nn.Module):
    """A bias for each distance, the window of which grows to both sides."""

    def __init__(self, width: int = 8, longest: int = 8) -> None:
        super().__init__()
        self.embed, self.head, self.longest = nn.Linear(3, width), nn.Linear(width, 2), longest
        self.relative = nn.Parameter(torch.randn(2 * longest - 1))

    def forward(self, x: Tensor) -> Tensor:
        n, h = x.shape[1], self.embed(x)
        window = self.relative[self.longest - n : self.longest + n - 1]
        scores = (h @ h.mT) + window.unfold(0, n, 1).flip(0)
        return self.head(scores.softmax(-1) @ h)


class Deeper(nn.Module):
    """Stacked layers, more of which are used later."""

    def __init__(self, width: int = 8, most: int = 5) -> None:
        super().__init__()
        self.embed, self.head, self.depth = nn.Linear(3, width), nn.Linear(width, 2), 2
        self.scales = nn.Parameter(torch.rand(most, width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for scale in self.scales[: self.depth]:
            h = torch.tanh(h * scale)
        return self.head(h)


def deeper(model: nn.Module, x: Tensor) -> Tensor:
    model.depth = 4
    try:
        return model(x)
    finally:
        model.depth = 2


# sizes that the constructor stored ------------------------------------------------------------------------------


class Sampler(nn.Module):
    """An autoencoder; only `sample` reads how wide its code is."""

    def __init__(self, z: int = 6) -> None:
        super().__init__()
        self.z = z
        self.encode = nn.Linear(5, z)
        self.decode = nn.Sequential(nn.Linear(z, 10), nn.ReLU(), nn.Linear(10, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))

    def sample(self, n: int) -> Tensor:
        return self.decode(torch.full((n, self.z), 0.5))


class FirstState(nn.Module):
    """A recurrent net whose first state the caller asks for."""

    def __init__(self, width: int = 8, n: int = 10, layers: int = 2) -> None:
        super().__init__()
        self.words, self.cells, self.head = nn.Embedding(9, width), nn.GRU(width, n, layers), nn.Linear(n, 9)
        self.nhid, self.nlayers = n, layers

    def first(self, batch: int) -> Tensor:
        return next(self.parameters()).new_zeros(self.nlayers, batch, self.nhid)

    def forward(self, words: Tensor, state: Tensor | None = None) -> Tensor:
        return self.head(self.cells(self.words(words), state)[0])


class Halves(nn.Module):
    """Another method takes a hidden layer apart in the middle."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.d = d
        self.up, self.down = nn.Linear(4, d), nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))

    def contrast(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return h[:, : self.d // 2].sum(-1) - h[:, self.d // 2 :].sum(-1)


class Shuffles(Halves):
    """A branch that only another argument takes does."""

    def forward(self, x: Tensor, mode: str = "plain") -> Tensor:
        h = torch.relu(self.up(x))
        if mode == "shuffled":
            h = h.view(-1, 2, self.d // 2).transpose(1, 2).reshape(len(x), self.d)
        return self.down(h)


# what is left of a run ------------------------------------------------------------------------------------------


class Remains(nn.Module):
    """What it keeps of the last run is in a tuple, which is not there at first."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(3, width), nn.Linear(width, 2), None

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.last is not None:
            h = h + self.last[0].mean(0)
        self.last = (h.detach(),)
        return self.down(h)


class Unused(nn.Module):
    """A tensor is made of a size, and nothing comes of it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        _ = {}.get("missing", h.new_zeros(h.shape))
        return self.down(h)


def sequences(*lengths: int) -> list[Tensor]:
    return [floats(2, n, 3, seed=n) for n in lengths]


COMPUTES = "code that no run reached computes with it (later_models.py"

CASES = (
    Case("learned positions", Positions, lambda: [*sequences(4, 16), (floats(2, 1, 3), 15)]),
    Case("learned positions from the end", FromTheEnd, lambda: sequences(4, 16)),
    Case("relative biases", RelativeBiases, lambda: sequences(3, 6, 8)),
    Case("deeper later", Deeper, lambda: [floats(2, 3), Do(deeper, floats(3, 3))]),
    Case("sampled by another method", Sampler, lambda: [floats(3, 5), Do(lambda m, n: m.sample(n), 4)]),
    Case(
        "the first state by another method",
        FirstState,
        lambda: [whole(9, 3, 2), Do(lambda m, w: m(w, m.first(w.shape[1]) + 1), whole(9, 4, 3))],
    ),
    Case(
        "halves in another method",
        Halves,
        lambda: [floats(2, 4), Do(lambda m, x: m.contrast(x), floats(3, 4))],
        may_refuse=COMPUTES,
    ),
    Case(
        "shuffled later",
        Shuffles,
        lambda: [floats(2, 4), (floats(3, 4), "shuffled")],
        may_refuse="no common refinement of (2×3) and (3×2)",
    ),
    Case("what remains in a tuple", Remains, lambda: [floats(2, 3), floats(4, 3)], used=True),
    Case("a tensor of its size that is not used", Unused, lambda: [floats(2, 3), floats(4, 3)], exact=False),
)
