"""What a run keeps of its ops: not the tensors, but what is needed to make them once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur.compat import schema, storage_id

VIEW, WRITE, MAKE = range(3)  # what an op does: look at memory, write into it, or make a result of its own

StorageKey = tuple[int, int]  # the number of the op that made some memory, and which of its results


class StoredView(NamedTuple):
    """What is needed to make a tensor once more over the same memory."""

    key: StorageKey
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    size: int  # bytes of memory that it reaches to


class Done(NamedTuple):
    """An op of a run that was computed; `out` is its result with forms in the place of tensors."""

    op: Any
    kind: int
    out: Any = None


class Read(NamedTuple):
    """A product with a parameter: the number of its op, the parameter, and what tells the data from others."""

    number: int
    name: str
    data: Any


class Nowhere:
    """Memory for tensors that nobody reads: the same for all of them, and never touched."""

    def __init__(self) -> None:
        self._storages: dict[torch.device, Tensor] = {}
        self._ids: dict[int, Tensor] = {}

    def tensor(self, form: StoredView) -> Tensor:
        """A tensor of a form; what is in it means nothing."""
        size = form.size
        room = self._storages.get(form.device)
        if room is None or room.numel() < size:
            room = torch.empty(2 * size + 64, dtype=torch.uint8, device=form.device)
            self._storages[form.device] = self._ids[storage_id(room)] = room
        made = torch.empty(0, dtype=form.dtype, device=form.device)
        return made.set_(room.untyped_storage(), form.offset, form.shape, form.stride)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of these."""
        return memory_of(tensor) in self._ids


def memory_of(tensor: Tensor) -> int:
    """Of its memory; of the tensor itself where it has none of its own."""
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def tensors(value: Any) -> Iterator[Tensor]:
    """Those among the arguments of an op, or its results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)


def to_forms(out: Any, form: Callable[[Tensor], StoredView | None]) -> Any:
    if isinstance(out, Tensor):
        return form(out)
    if isinstance(out, dict):
        return {key: to_forms(each, form) for key, each in out.items()}
    return type(out)(to_forms(each, form) for each in out) if isinstance(out, tuple | list) else out


def from_forms(out: Any, tensor: Callable[[StoredView], Tensor]) -> Any:
    if isinstance(out, StoredView):
        return tensor(out)
    if isinstance(out, dict):
        return {key: from_forms(each, tensor) for key, each in out.items()}
    return type(out)(from_forms(each, tensor) for each in out) if isinstance(out, tuple | list) else out


@cache
def written_to(op: Any) -> tuple[str, ...]:
    """The arguments that an op writes into."""
    return tuple(a.name for a in schema(op).arguments if a.alias_info is not None and a.alias_info.is_write)


@cache
def returned(op: Any) -> tuple[str, ...] | None:
    """The arguments that an op which writes gives back; None if it gives back anything else."""
    found = []
    for result in schema(op).returns:
        alias = result.alias_info
        names = [a.name for a in schema(op).arguments if alias and a.alias_info and a.alias_info.is_write]
        same = [n for n in names if _alias(op, n) & set(alias.before_set)]
        if not same:
            return None
        found.append(same[0])
    return tuple(found)


def _alias(op: Any, name: str) -> set[str]:
    return next(set(a.alias_info.before_set) for a in schema(op).arguments if a.name == name)


def argument_of(op: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an op is given under a name."""
    place = next(i for i, argument in enumerate(schema(op).arguments) if argument.name == name)
    return args[place] if place < len(args) else kwargs.get(name)
