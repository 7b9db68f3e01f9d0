"""The user's data, batch by batch: any iterable, also an endless one, read once."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur.arguments import Rule, a_number, check_fields, optional
from secateur.calibrate.blame import batch_name, because, check_batch
from secateur.calibrate.spill import Spill
from secateur.distributed import everyones, meet, pooled, ranks
from secateur.errors import CalibrationError, SecateurError
from secateur.progress import progress
from secateur.tracing.examples import tensors_in

_ROOM = 2**27  # bytes of batches in memory; what is more goes into files


@dataclass(frozen=True, eq=False)
class Data:
    """As much of some batches as is wanted: of an endless iterable, a part.

    >>> import itertools
    >>> endless = (torch.randn(8, 4) for _ in itertools.count())
    >>> sum(len(batch) for batch in Data(endless, samples=20))
    24
    >>> Data([torch.zeros(2, 512, dtype=torch.long)] * 9, tokens=4000)
    Data(samples=None, tokens=4000, minutes=None)

    Batches are taken until there are so many samples (the size of the first dimension of a batch's first tensor), so
    many tokens (elements of that tensor), or until reading them has taken so many minutes; at least one.
    """

    batches: Any = field(repr=False)
    _: KW_ONLY
    samples: int | None = None
    tokens: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        limit = optional(Rule("a positive number", a_number(above=0).holds))
        check_fields(self, CalibrationError, samples=limit, tokens=limit, minutes=limit)

    def __iter__(self) -> Iterator[Any]:
        return _Taking(self)


class _Taking(Iterator[Any]):
    """Batches of some data until a limit is reached."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._source: Iterator[Any] | None = None
        self._samples = self._tokens = 0
        self._start = time.monotonic()

    @property
    def share(self) -> float | None:
        """How much of what is wanted was taken, from 0 to 1; None where there is no limit. Progress bars show it."""
        wanted, minutes = self._data, (time.monotonic() - self._start) / 60
        limits = (wanted.samples, self._samples), (wanted.tokens, self._tokens), (wanted.minutes, minutes)
        return max((min(there / limit, 1.0) for limit, there in limits if limit is not None), default=None)

    def __next__(self) -> Any:
        if self._source is None:
            self._source = iter(made_of(self._data.batches, "Data"))
            self._start = time.monotonic()
        elif self.share == 1.0:
            raise StopIteration
        batch = next(self._source)
        first = next(tensors_in(batch), None)
        if first is not None:
            self._samples += len(first) if first.ndim else 1
            self._tokens += first.numel()
        return batch


def made_of(batches: Any, what: str, error: type[SecateurError] = CalibrationError) -> Iterable[Any]:
    """The iterable that a user gave, or a function of the user's makes."""
    given = batches
    if callable(batches) and not isinstance(batches, Iterable | nn.Module | type):
        try:
            given = batches()
        except Exception as reason:  # any code of the user's may run here
            raise error(f"{what}: batches() failed, which is called without arguments: {because(reason)}") from reason
    if isinstance(given, Tensor | str | bytes | Mapping | nn.Module | type) or not isinstance(given, Iterable):
        raise error(
            f"{what}: batches is an iterable of batches, such as a list or a DataLoader, not a {type(given).__name__}"
        )
    return given


def looked_at(batches: Iterable[Any], what: str, example: Any = None) -> Iterator[Any]:
    """Batches as they come, each as an example, if there is one: refused by number if it cannot be read or used."""
    source = iter(batches)
    for number in count():
        try:
            batch = next(source)
        except StopIteration:
            return
        except SecateurError:
            raise
        except Exception as error:  # any code of the user's may run here
            raise CalibrationError(f"{what}: {batch_name(number)} could not be read: {because(error)}") from error
        batch = batch if example is None else like(example, batch)
        check_batch(batch, number, what)
        yield batch


def each(batches: Any, what: str, example: Any = None) -> Iterator[Any]:
    """Every batch, one at a time, under a progress bar; at least one. As `example` is, if that is given.

    >>> list(each([1, 2], "reading")), list(each(lambda: iter([1, 2]), "reading"))
    ([1, 2], [1, 2])

    `batches` is an iterable, or a function without arguments that makes one. In a process group, the batches of all
    ranks are seen by each.
    """
    empty = True
    made = made_of(batches, what)
    for batch in looked_at(progress(made if ranks() == 1 else everyones(made, what), what), what, example):
        empty = False
        yield batch
    if empty:
        raise no_batches(what)


def each_own(batches: Any, what: str) -> Iterator[Any]:
    """As `each`, but in a process group each rank sees its own batches only, if any, and `totals` adds up."""
    yield from each(batches, what) if ranks() == 1 else looked_at(progress(made_of(batches, what), what), what)


def no_batches(what: str) -> CalibrationError:
    """That there is nothing to look at."""
    return CalibrationError(
        f"{what}: there are no batches. A generator is used up after one pass: give a list, a DataLoader, or the "
        "function that makes the generator"
    )


def like(example: Any, batch: Any) -> Any:
    """A batch without what the example does not have: labels behind the inputs, further entries of a dict.

    >>> like(torch.zeros(1, 4), (torch.ones(8, 4), "labels")).shape
    torch.Size([8, 4])
    >>> sorted(like({"ids": 1, "mask": 1}, {"ids": 2, "mask": 2, "labels": 2}))
    ['ids', 'mask']
    """
    several = isinstance(batch, tuple | list)
    if isinstance(example, tuple | list):
        return tuple(batch[: len(example)]) if several else batch
    if several and len(batch) > 1 and isinstance(batch[0], Mapping if isinstance(example, Mapping) else Tensor):
        batch = batch[0]
    if isinstance(example, Mapping) and isinstance(batch, Mapping) and example.keys() <= batch.keys():
        return {name: batch[name] for name in example}
    return batch


@contextmanager
def taken(batches: Any, what: str, example: Any = None) -> Iterator[Sequence[Any]]:
    """All batches, to be gone through as often as one likes; each as an example, if there is one.

    >>> with taken((torch.full((1,), n) for n in range(3)), "reading") as found:
    ...     [int(batch) for batch in found], int(found[1])
    ([0, 1, 2], 1)

    What is not a list already is read once: some iterables are used up then, others give another order or other noise
    the next time. Little of it stays in memory, the rest goes into files.
    """
    made = made_of(batches, what)
    if isinstance(made, Spooled | Some):  # looked at already
        yield made
        return
    if isinstance(made, list | tuple) and made and example is None and ranks() == 1:
        deque(looked_at(made, what), maxlen=0)
        yield made
        return
    with Spill(_ROOM) as spill:
        found = Spooled(spill)
        for batch in each(made, what, example):
            found.add(batch)
        yield found


class Batches(Sequence[Any], ABC):
    """Batches by number; how one is come by is for each kind to say."""

    @abstractmethod
    def at(self, number: int) -> Any:
        """One of the batches."""

    @overload
    def __getitem__(self, number: int) -> Any: ...
    @overload
    def __getitem__(self, number: slice) -> list[Any]: ...
    def __getitem__(self, number: int | slice) -> Any:
        chosen = range(len(self))[number]
        return self.at(chosen) if isinstance(chosen, int) else [self.at(n) for n in chosen]


class Some(Batches):
    """At most so many of some batches, spread evenly.

    >>> list(Some([0, 1, 2, 3, 4, 5], 3)), list(Some([0, 1], 3))
    ([0, 2, 4], [0, 1])
    """

    def __init__(self, batches: Sequence[Any], most: int) -> None:
        self._batches = batches
        count = min(most, len(batches))
        self._chosen = [i * len(batches) // count for i in range(count)]

    @property
    def own(self) -> list[int]:
        """Those that this rank runs."""
        mine = set(own(self._batches))
        return [at for at, number in enumerate(self._chosen) if number in mine]

    @property
    def dealt(self) -> bool:
        """Whether each rank has a part of them."""
        return is_dealt(self._batches)

    def __len__(self) -> int:
        return len(self._chosen)

    def at(self, number: int) -> Any:
        return self._batches[self._chosen[number]]


class Dealt(Batches):
    """The batches of all ranks, of which this one has its own and the first, numbered as one process would have them.

    The first is there for all to see how the model goes; it counts where it came from.
    """

    dealt = True

    def __init__(self, first: Any, held: Mapping[int, int], batches: Sequence[Any], count: int) -> None:
        self._first, self._held, self._batches, self._count = first, held, batches, count

    @property
    def own(self) -> list[int]:
        """Those that this rank runs."""
        return list(self._held)

    def __len__(self) -> int:
        return self._count

    def at(self, number: int) -> Any:
        return self._first if not number else self._batches[self._held[number]]


def own(batches: Sequence[Any]) -> Sequence[int]:
    """The numbers of the batches that this rank is to run; on one process all.

    >>> list(own(["a", "b"]))
    [0, 1]
    """
    found: Sequence[int] | None = getattr(batches, "own", None)
    return range(len(batches)) if found is None else found


def is_dealt(batches: Sequence[Any]) -> bool:
    """Whether each rank has a part of some batches, so that sums over them are to be added up."""
    return bool(getattr(batches, "dealt", False))


def with_first(batches: Sequence[Any]) -> Sequence[int]:
    """The batches that this rank is to run, and the first, which tells how the model goes."""
    return sorted({0, *own(batches)})


@contextmanager
def dealt(batches: Any, what: str, example: Any = None) -> Iterator[Sequence[Any]]:
    """As `taken`, but in a process group each rank has its own batches only, and the first of all.

    They are numbered as `each` has them: the first of each rank, then the second of each, and so on.
    """
    if isinstance(batches, Batches):
        yield batches
        return
    if ranks() == 1:
        with taken(batches, what, example) as found:
            yield found
        return
    with Spill(_ROOM) as spill:
        mine = Spooled(spill)
        for batch in looked_at(progress(made_of(batches, what), what), what, example):
            mine.add(batch)
        counts = [int(said) for said in meet(f"{what}: batches", str(len(mine)))]
        order = sorted((turn, rank) for rank, count in enumerate(counts) for turn in range(count))
        if not order:
            raise no_batches(what)
        held = {at: turn for at, (turn, rank) in enumerate(order) if rank == dist.get_rank()}
        device = next((tensor.device for tensor in tensors_in(mine[0])), "cpu") if mine else "cpu"
        first = pooled(f"{what}: first batch", {0: mine[0]} if 0 in held else {}, device)[0]
        yield Dealt(first, held, mine, len(order))


class _Form(NamedTuple):
    """Where a tensor was in a batch."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device


class Spooled(Batches):
    """Batches that were put aside."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._forms: list[Any] = []

    def add(self, batch: Any) -> None:
        """Put a batch aside."""
        tensors: dict[str, Tensor] = {}
        self._forms.append(_put(batch, tensors))
        self._spill.put(f"{len(self._forms) - 1}", tensors)

    def __len__(self) -> int:
        return len(self._forms)

    def at(self, number: int) -> Any:
        return _got(self._forms[number], self._spill.get(f"{number}"))


def _put(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A batch with forms in the place of its tensors, whose bytes go to `tensors`."""
    if isinstance(value, Mapping):
        return {key: _put(each, tensors) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_put(each, tensors) for each in value)
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
        return value
    form = _Form(f"{len(tensors)}", value.dtype, tuple(value.shape), value.device)
    tensors[form.name] = value.detach().resolve_conj().reshape(-1).contiguous().view(torch.uint8).clone()
    return form


def _got(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, _Form):
        return tensors[value.name].view(value.dtype).reshape(value.shape).to(value.device)
    if isinstance(value, dict):
        return {key: _got(each, tensors) for key, each in value.items()}
    return type(value)(_got(each, tensors) for each in value) if type(value) in (tuple, list) else value
