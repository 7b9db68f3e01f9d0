"""The user's batches: a part that is held back to judge by, the others in a new order each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from secateur.calibrate.blame import check_batch
from secateur.calibrate.data import made_of
from secateur.errors import TrainingError
from secateur.training.examples import chosen_rows, in_pieces, prints

_PART = 10  # one batch of so many is held back
_MOST = 8  # batches that are held back
_LEAST = 8  # examples of each, where few batches are taken apart to be more
_FRUITLESS = 1000  # batches, one after the other, of which nothing is left

Numbered = tuple[int, Any]  # a batch, and which it is


class TrainingData:
    """Batches to learn from and a few to judge by, which are never learnt from.

    >>> data = TrainingData([torch.full((1,), float(i)) for i in range(20)])
    >>> len(data.held), [float(batch) for _, batch in data.held]
    (2, [0.0, 10.0])
    >>> sorted(number for number, _ in data.once(seed=0))[:3]
    [1, 2, 3]

    Each comes with its number, and what `inputs` makes of it is looked at. A list is taken apart by batches and a
    `DataLoader` by the examples of its dataset. Of anything else every tenth batch is left out. Where `by_rows` says of
    a batch that its rows are its examples, those that are held back are left out wherever they come again, as in the
    second epoch of a list, and no more of them are held back than a tenth of those that there are.

    >>> epoch = [torch.arange(4.0).reshape(4, 1) + 4 * i for i in range(10)]
    >>> data = TrainingData(3 * epoch, by_rows=lambda inputs: True)
    >>> sorted({int(x) for _, batch in data.held for x in batch})
    [0, 1, 2, 3]
    >>> min(int(x) for _, batch in data.once(seed=0) for x in batch)
    4
    """

    def __init__(
        self,
        batches: Any,
        inputs: Callable[[Any], Any] = lambda batch: batch,
        by_rows: Callable[[Any], bool] = lambda batch: False,
    ) -> None:
        self._inputs, self._by_rows = inputs, by_rows
        self._kept: set[int] | None = None  # prints of the examples that are held back, where there are any
        self._again: Callable[[int], Iterable[Numbered]]
        if _can_be_split(batches):
            rest, kept = _split(batches)
            held = self._held(enumerate(kept), range(_MOST), part=1)
            self._again = lambda seed: enumerate(rest)
        elif isinstance(batches, Sequence) and not isinstance(batches, str | bytes):
            chosen = _chosen(len(batches))
            needed = (i for i in range(len(batches)) if i in chosen or self._kept is not None)
            held = self._held(((i, batches[i]) for i in needed), chosen)
            others = [i for i in range(len(batches)) if i not in {number for number, _ in held}]
            self._again = lambda seed: ((others[i], batches[others[i]]) for i in _order(len(others), seed))
        else:
            make = partial(made_of, batches, "recover", TrainingError)
            held = self._held(enumerate(make()), range(0, _PART * _MOST, _PART))
            away = {number for number, _ in held}
            self._again = lambda seed: ((i, batch) for i, batch in enumerate(make()) if i not in away)
        self.held = held if self._kept is None else list(_more(held))
        if not self.held or next(iter(self.once(0)), None) is None:
            raise TrainingError(
                "recover: it takes two batches at least, one to learn from and one to judge by, with other examples. "
                "A generator is used up after one pass: give a list, a DataLoader, or the function that makes it"
            )

    def _held(self, numbered: Iterable[Numbered], wanted: Sequence[int], part: int = _PART) -> list[Numbered]:
        """Those of the batches that are wanted, as long as one of so many examples up to there is not held back yet."""
        held: list[Numbered] = []
        seen: set[int] = set()
        for number, batch in numbered:
            if number in wanted:
                self._look_at(number, batch)
            if not held and self._by_rows(batch):
                self._kept = set()
            new = set() if self._kept is None else set(prints(self._inputs(batch)))
            seen |= new
            if number in wanted and (not self._kept or part * len(self._kept) < len(seen)):
                held.append((number, batch))
                self._kept = self._kept if self._kept is None else self._kept | new
            if number >= max(wanted):
                break
        return held

    def _look_at(self, number: int, batch: Any) -> None:
        check_batch(self._inputs(batch), number, "recover")

    def once(self, seed: int) -> Iterator[Numbered]:
        """Every batch to learn from, once."""
        fruitless = 0
        for number, batch in self._again(seed):
            self._look_at(number, batch)
            left = self._to_learn_from(batch)
            fruitless = fruitless + 1 if left is None else 0
            if left is not None:
                yield number, left
            elif fruitless == _FRUITLESS:
                return

    def _to_learn_from(self, batch: Any) -> Any:
        """A batch without the examples that are held back; None if that is all of them."""
        if self._kept is None:
            return batch
        new = torch.tensor([one not in self._kept for one in prints(self._inputs(batch))])
        if bool(new.all()):
            return batch
        return chosen_rows(batch, new.nonzero().flatten()) if bool(new.any()) else None

    def stream(self, seed: int) -> Iterator[Numbered]:
        """Batches without end."""
        while True:
            yield from self.once(seed)
            seed += 1


def _more(held: Sequence[Numbered]) -> Iterator[Numbered]:
    """As many batches as can be told from chance by, of the examples of some."""
    for number, batch in held:
        for piece in in_pieces(batch, _MOST // len(held), _LEAST):
            yield number, piece


def _chosen(n: int) -> list[int]:
    """Evenly over all batches: they may come in an order."""
    count = min(_MOST, max(1, n // _PART)) if n > 1 else 0
    return [i * n // count for i in range(count)]


def _order(n: int, seed: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def _can_be_split(batches: Any) -> bool:
    """Whether a loader draws single examples from a dataset, at random or in order, so that two can do the same."""
    return (
        isinstance(batches, DataLoader)
        and not isinstance(batches.dataset, IterableDataset)
        and type(batches.sampler) in (RandomSampler, SequentialSampler)
        and batches.batch_size is not None
        and len(batches.dataset) >= 2 * batches.batch_size  # type: ignore[arg-type]
    )


def _split(loader: DataLoader[Any]) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The same loader of two parts of its dataset."""
    n, size = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]
    order = _order(n, 0)
    cut = size * min(_MOST, max(1, n // size // _PART))

    def part(chosen: list[int], shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            Subset(loader.dataset, sorted(chosen)),
            batch_size=size,
            shuffle=shuffle,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
        )

    return part(order[cut:], isinstance(loader.sampler, RandomSampler)), part(order[:cut], False)
