"""The user's batches: a part that is held back to judge by, the others in a new order each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from secateur.calibrate.blame import check_batch
from secateur.calibrate.data import made_of
from secateur.errors import TrainingError

_PART = 10  # one batch of so many is held back
_MOST = 8  # batches that are held back

Numbered = tuple[int, Any]  # a batch, and which it is


class TrainingData:
    """Batches to learn from and a few to judge by, which are never learnt from.

    >>> data = TrainingData([torch.full((1,), float(i)) for i in range(20)])
    >>> len(data.held), [float(batch) for _, batch in data.held]
    (2, [0.0, 10.0])
    >>> sorted(number for number, _ in data.once(seed=0))[:3]
    [1, 2, 3]

    Each comes with its number, and what `inputs` makes of it is looked at. A list is taken apart by batches and a
    `DataLoader` by the examples of its dataset. Of anything else every tenth batch is left out, which keeps them apart
    as long as it gives the same examples in the same order each time.
    """

    def __init__(self, batches: Any, inputs: Callable[[Any], Any] = lambda batch: batch) -> None:
        held: Iterable[Numbered]
        self._inputs = inputs
        self._again: Callable[[int], Iterable[Numbered]]
        if _can_be_split(batches):
            rest, kept = _split(batches)
            held = enumerate(kept)
            self._again = lambda seed: enumerate(rest)
        elif isinstance(batches, Sequence) and not isinstance(batches, str | bytes):
            chosen = _chosen(len(batches))
            held = ((i, batches[i]) for i in chosen)
            others = [i for i in range(len(batches)) if i not in chosen]
            self._again = lambda seed: ((others[i], batches[others[i]]) for i in _order(len(others), seed))
        else:
            make = partial(made_of, batches, "recover", TrainingError)
            held = islice(enumerate(make()), 0, _PART * _MOST, _PART)
            self._again = lambda seed: ((i, batch) for i, batch in enumerate(make()) if i % _PART or i >= _PART * _MOST)
        self.held = list(self._looked_at(held))
        if not self.held or next(iter(self.once(0)), None) is None:
            raise TrainingError(
                "recover: it takes two batches at least, one to learn from and one to judge by. A generator is used up "
                "after one pass: give a list, a DataLoader, or the function that makes the generator"
            )

    def _looked_at(self, numbered: Iterable[Numbered]) -> Iterator[Numbered]:
        for number, batch in numbered:
            check_batch(self._inputs(batch), number, "recover")
            yield number, batch

    def once(self, seed: int) -> Iterator[Numbered]:
        """Every batch to learn from, once."""
        yield from self._looked_at(self._again(seed))

    def stream(self, seed: int) -> Iterator[Numbered]:
        """Batches without end."""
        while True:
            yield from self.once(seed)
            seed += 1


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
