"""The data of all ranks, seen by each: so every rank learns what one process would from all of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from secateur.distributed.meeting import group, meet, ranks, together
from secateur.errors import CalibrationError

_END = "end"
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def everyones(batches: Iterable[Any], what: str) -> Iterator[Any]:
    """The first batch of each rank, in order, then the second of each, and so on; on one process, its own.

    >>> list(everyones([1, 2], "reading"))
    [1, 2]

    Ranks may have different numbers of batches, none included. A batch is of tensors, plain values, and tuples, lists
    and mappings of these.
    """
    if ranks() == 1:
        yield from batches
        return
    own = iter(batches)
    device = torch.device("cpu")
    while True:
        with together(what):
            batch = next(own, _END)
            tensors: list[Tensor] = []
            form = _END if batch is _END else json.dumps(described(batch, tensors))
            device = tensors[0].device if tensors else device
        forms = meet(f"{what}: batches", form)
        if all(each == _END for each in forms):
            return
        for owner, each in enumerate(forms):
            if each != _END:
                mine = owner == dist.get_rank()
                theirs = sent(json.loads(each), tensors if mine else None, owner, device)
                yield batch if mine else theirs


def described(item: Any, tensors: list[Tensor]) -> Any:
    """What a batch is made of, as JSON; its tensors are put into the list, in order."""
    if isinstance(item, Tensor):
        tensors.append(item)
        return {"tensor": list(item.shape), "dtype": str(item.dtype)}
    if item is None or isinstance(item, bool | int | float | str):
        return {"value": item}
    if isinstance(item, Mapping) and all(isinstance(key, str) for key in item):
        return {"dict": [[key, described(item[key], tensors)] for key in item]}
    if isinstance(item, tuple | list):
        return {"tuple" if isinstance(item, tuple) else "list": [described(part, tensors) for part in item]}
    raise CalibrationError(
        f"a batch with a {type(item).__name__} cannot be sent to the other ranks; give tensors, and tuples, lists and "
        "dicts of these"
    )


def sent(form: Any, own: list[Tensor] | None, owner: int, device: torch.device) -> Any:
    """A batch, sent by its owner to all: tensor by tensor, in the order of its form."""
    left = None if own is None else iter(own)

    def made(part: Any) -> Any:
        if "tensor" in part:
            dtype = _DTYPES[part["dtype"]]
            tensor = torch.empty(part["tensor"], dtype=dtype) if left is None else next(left).detach().cpu()
            plain = tensor.contiguous()
            if plain.numel():
                dist.broadcast(plain.view(-1).view(torch.uint8), owner, group=group())
            return plain.to(device)
        if "value" in part:
            return part["value"]
        if "dict" in part:
            return {key: made(value) for key, value in part["dict"]}
        ((kind, parts),) = part.items()
        return tuple(map(made, parts)) if kind == "tuple" else list(map(made, parts))

    return made(form)


__all__ = ["described", "everyones", "sent"]
