"""What goes in and what comes out: objects, dataclasses, named tuples, dicts of lists, keywords."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beyond.harness import Case, floats, whole


class Body(nn.Module):
    """Two hidden layers; `h` is what outputs are made of."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 12), nn.Linear(12, d), nn.Linear(d, 3)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(torch.relu(self.a(x))))


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor | None = None
    parts: dict[str, list[Tensor]] = field(default_factory=dict)


class Triple(NamedTuple):
    logits: Tensor
    states: tuple[Tensor, ...]
    name: str


class Holder:
    """A plain object."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class GivesDataclass(Body):
    def forward(self, x: Tensor) -> Answer:
        h = self.hidden(x)
        y = self.head(h)
        return Answer(y, h, {"levels": [y, y.softmax(-1)]})


class GivesTuple(Body):
    def forward(self, x: Tensor) -> Triple:
        h = self.hidden(x)
        return Triple(self.head(h), (h, h.mean(-1)), "triple")


class GivesDict(Body):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.hidden(x)
        return OrderedDict(out=self.head(h), hidden=[h, {"again": h * 2}], count=h.shape[-1])


class GivesObject(Body):
    def forward(self, x: Tensor) -> Holder:
        h = self.hidden(x)
        return Holder(logits=self.head(h), hidden=h)


class GivesDeepObject(Body):
    """The hidden features are two objects down."""

    def forward(self, x: Tensor) -> Holder:
        h = self.hidden(x)
        return Holder(logits=self.head(h), inner=Holder(features=h))


class GivesDeeperObject(Body):
    """They are in a list in an object in a namespace."""

    def forward(self, x: Tensor) -> SimpleNamespace:
        h = self.hidden(x)
        return SimpleNamespace(main=Holder(logits=self.head(h), all=[Holder(h=h)]), shape=x.shape)


class Batch(NamedTuple):
    images: Tensor
    labels: Tensor
    weight: Tensor | None = None


class TakesNamed(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.conv, self.label, self.out = nn.Conv2d(1, d, 3), nn.Embedding(5, d), nn.Linear(d, 2)

    def forward(self, batch: Batch) -> Tensor:
        h = F.relu(self.conv(batch.images)).amax((2, 3)) + self.label(batch.labels)
        if batch.weight is not None:
            h = h * batch.weight[:, None]
        return self.out(F.relu(h))


@dataclass
class Record:
    x: Tensor
    lengths: list[int]


class TakesRecord(nn.Module):
    """A dataclass with a list of plain ints."""

    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, d), nn.Linear(d, 2)

    def forward(self, record: Record) -> Tensor:
        h = F.relu(self.a(record.x))
        return self.b(torch.stack([part[:n].sum(0) for part, n in zip(h, record.lengths, strict=True)]))


class Attributes(dict[str, Any]):
    """A dict whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class TakesAttributes(nn.Module):
    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, d), nn.Linear(d, 2)

    def forward(self, batch: Attributes) -> Attributes:
        h = F.relu(self.a(batch.x) * batch.extra["weight"])
        return Attributes(logits=self.b(h), hidden=Attributes(sum=h.sum(-1)))


class TakesKeywords(nn.Module):
    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.words, self.segments, self.mix, self.out = (
            nn.Embedding(9, d),
            nn.Embedding(2, d),
            nn.Linear(d, 12),
            nn.Linear(12, 2),
        )

    def forward(self, *, tokens: Tensor, segments: Tensor | None = None, pool: bool = True) -> Tensor:
        x = self.words(tokens)
        if segments is not None:
            x = x + self.segments(segments)
        x = torch.relu(self.mix(x))
        return self.out(x.mean(1) if pool else x)


class TakesList(nn.Module):
    """Images of any sizes in a list, as detectors take them."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.stem, self.deep, self.out = nn.Conv2d(1, d, 3, padding=1), nn.Conv2d(d, 10, 3, padding=1), nn.Linear(10, 2)

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        found = []
        for image in images:
            x = F.relu(self.deep(F.relu(self.stem(image[None]))))
            found.append(self.out(x.flatten(2).amax(-1))[0])
        return found


class Bags(nn.Module):
    """Embedding bags of offsets, numbers beside them, and their products in pairs, as recommenders do."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, d, mode="sum") for n in (7, 9))
        self.bottom = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, d))
        self.top = nn.Sequential(nn.Linear(d + 3, 10), nn.ReLU(), nn.Linear(10, 1))

    def forward(self, dense: Tensor, ids: list[Tensor], offsets: list[Tensor]) -> Tensor:
        x = self.bottom(dense)
        every = torch.stack([x, *(bag(i, o) for bag, i, o in zip(self.bags, ids, offsets, strict=True))], 1)
        products = torch.bmm(every, every.transpose(1, 2))
        rows, columns = torch.tril_indices(3, 3, -1)
        return self.top(torch.cat([x, products[:, rows, columns]], 1))


def bags(n: int, k: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    start = torch.arange(n) * k
    return floats(n, 3), [whole(7, n * k), whole(9, n * k)], [start, start]


def batches(*counts: int) -> list[tuple[Batch]]:
    made = [Batch(floats(n, 1, 5, 5), whole(5, n)) for n in counts]
    return [(batch,) for batch in (*made, Batch(floats(2, 1, 6, 4), whole(5, 2), floats(2)))]


def rows() -> list[Tensor]:
    return [floats(n, 4, seed=n) for n in (3, 5, 1)]


CASES = (
    Case("dataclass out", GivesDataclass, rows),
    Case("named tuple out", GivesTuple, rows),
    Case("dict of lists out", GivesDict, rows),
    Case("object out", GivesObject, rows),
    Case("object in an object out", GivesDeepObject, rows),
    Case("list in an object in a namespace out", GivesDeeperObject, rows),
    Case("named tuple in", TakesNamed, lambda: batches(3, 4)),
    Case(
        "dataclass in", TakesRecord, lambda: [(Record(floats(2, 4, 3), [4, 2]),), (Record(floats(3, 6, 3), [1, 6, 5]),)]
    ),
    Case(
        "dict of attributes in",
        TakesAttributes,
        lambda: [(Attributes(x=floats(n, 3), extra=Attributes(weight=floats(n, 1))),) for n in (2, 5)],
    ),
    Case(
        "keywords in",
        TakesKeywords,
        lambda: [
            {"tokens": whole(9, 2, 4), "segments": whole(2, 2, 4)},
            {"tokens": whole(9, 3, 7)},
            {"tokens": whole(9, 1, 2), "pool": False},
        ],
    ),
    Case("list of tensors in", TakesList, lambda: [([floats(1, 5, 5), floats(1, 6, 4)],), ([floats(1, 3, 7)],)]),
    Case("embedding bags", Bags, lambda: [bags(2, 2), bags(3, 1), bags(4, 3)]),
)
