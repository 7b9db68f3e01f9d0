"""The examples of a batch, where they are the rows of its tensors: told apart, so that none is on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from secateur.tracing.examples import mapped, tensors_in


def rows(batch: Any) -> int:
    """How many rows all tensors of a batch have; 0 where they differ, or where there is more than tensors and numbers.

    >>> rows((torch.zeros(4, 3), torch.zeros(4))), rows((torch.zeros(4, 3), torch.zeros(2)))
    (4, 0)
    >>> rows((torch.zeros(2, 3), ["a name", "another"]))
    0
    """
    found = set(_counts(batch))
    return found.pop() if len(found) == 1 else 0


def _counts(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor):
        yield len(batch) if batch.ndim and batch.layout is torch.strided else 0
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _counts(part)
    elif batch is not None and not isinstance(batch, bool | int | float):
        yield 0


def chosen_rows(batch: Any, index: Tensor) -> Any:
    """Some examples of a batch.

    >>> chosen_rows({"x": torch.tensor([5, 6, 7]), "y": None}, torch.tensor([0, 2]))
    {'x': tensor([5, 7]), 'y': None}
    """
    return mapped(batch, lambda tensor: tensor[index.to(tensor.device)])


def prints(inputs: Any) -> list[int]:
    """A number for each example, the same for the same values.

    >>> a, b, c = prints(torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0]]))
    >>> a == c, a == b
    (True, False)
    """
    lines = [
        tensor.detach().resolve_conj().reshape(len(tensor), -1).contiguous().cpu().view(torch.uint8).numpy()
        for tensor in tensors_in(inputs)
    ]
    return [hash(tuple(line[i].tobytes() for line in lines)) for i in range(len(lines[0]))]


def in_pieces(batch: Any, most: int, least: int) -> Iterable[Any]:
    """A batch as several, at most so many, each with so many examples at least.

    >>> [len(piece) for piece in in_pieces(torch.zeros(20), most=8, least=4)]
    [4, 4, 4, 4, 4]
    """
    count = rows(batch)
    pieces = max(1, min(most, count // least))
    return [chosen_rows(batch, index) for index in torch.arange(count).tensor_split(pieces)]
