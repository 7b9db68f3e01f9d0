"""The user's batches: a part that is held back to judge by, the others in a new order each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from secateur.errors import TrainingError

_PART = 10  # one batch of so many is held back
_MOST = 8  # batches that are held back


class TrainingData:
    """Batches to learn from and a few to judge by, which are never learnt from.

    >>> data = TrainingData([torch.full((1,), float(i)) for i in range(20)])
    >>> len(data.held), [float(batch) for batch in data.held]
    (2, [0.0, 10.0])
    >>> sorted(float(batch) for batch in data.once(seed=0))[:3]
    [1.0, 2.0, 3.0]

    A list is taken apart by batches and a `DataLoader` by the examples of its dataset. Of anything else every tenth
    batch is left out, which keeps them apart as long as it gives the same examples in the same order each time.
    """

    def __init__(self, batches: Any) -> None:
        self.held: list[Any]
        self._again: Callable[[int], Iterable[Any]]
        if _can_be_split(batches):
            rest, held = _split(batches)
            self.held = list(held)
            self._again = lambda seed: rest
        elif isinstance(batches, Sequence) and not isinstance(batches, str | bytes):
            chosen = _chosen(len(batches))
            self.held = [batches[i] for i in chosen]
            others = [i for i in range(len(batches)) if i not in chosen]
            self._again = lambda seed: (batches[others[i]] for i in _order(len(others), seed))
        else:
            make = _maker(batches)
            self.held = list(islice(make(), 0, _PART * _MOST, _PART))
            self._again = lambda seed: (b for i, b in enumerate(make()) if i % _PART or i >= _PART * _MOST)
        if not self.held or next(iter(self.once(0)), None) is None:
            raise TrainingError(
                "recover: it takes two batches at least, one to learn from and one to judge by. A generator is used up "
                "after one pass: give a list, a DataLoader, or the function that makes the generator"
            )

    def once(self, seed: int) -> Iterator[Any]:
        """Every batch to learn from, once."""
        yield from self._again(seed)

    def stream(self, seed: int) -> Iterator[Any]:
        """Batches without end."""
        while True:
            yield from self.once(seed)
            seed += 1


def _maker(batches: Any) -> Callable[[], Iterable[Any]]:
    if isinstance(batches, Tensor | str | bytes | Mapping) or not (isinstance(batches, Iterable) or callable(batches)):
        raise TrainingError(
            f"recover: batches is an iterable, such as a list or a DataLoader, not a {type(batches).__name__}"
        )
    return batches if callable(batches) and not isinstance(batches, Iterable) else lambda: batches


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
