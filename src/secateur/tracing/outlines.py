"""Ops on fake tensors, without asking torch again for what it has answered before.

Half of a tracing run would be spent in torch's own bookkeeping of fake tensors: for each op it works out a device,
looks for a stand-in and writes down everything that may tell one call from another. Most calls are like an earlier one:
layers come in rows, and the model runs several times. What a new tensor looks like (an `_Outline`) then follows from
what the op was given: for ops that make tensors anew, from numbers and what its tensors look like, so it is remembered,
and so it is that an op which writes into its first tensor leaves that as it looks; for views, torch's kernels tell it
at once. Everything else (reading, shapes that depend on data, tensors that know their values) goes the long way, as
does a call that is the first of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch

from secateur.compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    in_fake_kernel,
    schema,
    storage_id,
    without_torch_function,
)
from secateur.ops.view import VIEWS
from secateur.tracing.fakes import fake_of

DEVICE = torch.ops.prim.device.default  # which torch asks of each tensor again and again
_MOST = 1 << 16  # outlines that are remembered
_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class _Outline(NamedTuple):
    """All that a fake tensor is, but for the memory that it may share with others."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int

    @classmethod
    def of(cls, tensor: Any) -> _Outline:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device, tensor.storage_offset())


class _UnlikeError(Exception):
    """A call is none of those that can be told from what they are given."""


# What came of calls: in what, and how it looks; None is the first tensor that was given, which was written into.
_remembered: dict[Any, tuple[type | None, list[_Outline]] | None] = {}


def carried_out(mode: FakeTensorMode | None, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an op puts out.

    >>> mode = FakeTensorMode()
    >>> x = mode.from_tensor(torch.zeros(2, 3))
    >>> carried_out(mode, DEVICE, (x,), {})
    device(type='cpu')
    """
    if mode is None or in_fake_kernel is None or not isinstance(op, OpOverload):
        return op(*args, **kwargs)
    if op is DEVICE and type(args[0]) is FakeTensor:
        return args[0].fake_device
    with without_torch_function():
        if op in VIEWS and not kwargs and _is_plain(mode, args[0]):
            with suppress(RuntimeError):  # which torch says in its own words below
                return _view(mode, op, args)
        tensors: list[Any] = []
        writes = _writes(op)
        key = None if writes is None else _key(mode, op, args, kwargs, tensors)
        if writes and not (args and tensors and tensors[0] is args[0] and tensors[0].constant is None):
            key = None
        if key is not None and key in _remembered:
            found = _remembered[key]
            return args[0] if found is None else _made_again(mode, *found)
        memory = storage_id(args[0]) if key is not None and writes else 0
    out = op(*args, **kwargs)
    if key is not None:
        with without_torch_function():
            if not writes:
                _remember(mode, key, tensors, out)
            elif out is args[0] and storage_id(out) == memory and _key(mode, op, args, kwargs, []) == key:
                _put(key, None)
    return out


@cache
def _writes(op: OpOverload) -> bool | None:
    """Whether an op writes into the first tensor that it is given, and puts that out (True), or makes new tensors, of a
    kind that what it is given tells (False); None if it does something else."""
    said = schema(op)
    if op.namespace != "aten" or not _BY_DATA.isdisjoint(op.tags) or op in VIEWS:
        return None
    given, out = ([each.alias_info for each in some] for some in (said.arguments, said.returns))
    if not any((*given, *out)):
        return False
    one = len(out) == 1 and out[0] is not None and out[0].is_write
    return True if one and given[0] is not None and not any(given[1:]) else None


def _is_plain(mode: FakeTensorMode, tensor: Any) -> bool:
    """Whether a tensor is a fake one of this run that looks as its outline says and does not know its values."""
    return type(tensor) is FakeTensor and tensor.constant is None and _looks_so(mode, tensor)


def _looks_so(mode: FakeTensorMode, tensor: Any) -> bool:
    """Whether a fake tensor is one of this run that looks as its outline says."""
    return (
        tensor.fake_mode is mode
        and tensor.layout is torch.strided
        and not (tensor.is_complex() or tensor.is_neg() or tensor._is_zerotensor())
    )


def _key(mode: FakeTensorMode, op: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
    """What tells one call from another; None where something else does, too. `tensors` gets those that are given.

    Where all of them know their values, so does what is made of them.
    """
    try:
        given = tuple(_told(mode, (*args, *kwargs, *kwargs.values()), tensors))
    except _UnlikeError:
        return None
    open_ = not tensors or any(tensor.constant is None for tensor in tensors)
    return (op, torch.get_default_dtype(), given) if open_ else None


def _told(mode: FakeTensorMode, items: Iterable[Any], tensors: list[Any]) -> Iterator[Any]:
    for item in items:
        kind = type(item)
        if kind is FakeTensor:
            if not _looks_so(mode, item):
                raise _UnlikeError
            tensors.append(item)
            yield _Outline.of(item)
        elif kind in _PLAIN:
            yield kind, item
        elif kind is list or kind is tuple:
            yield tuple(_told(mode, item, tensors))
        else:
            raise _UnlikeError


def _remember(mode: FakeTensorMode, key: Any, given: Sequence[Any], out: Any) -> None:
    several = type(out) if isinstance(out, list | tuple) else None
    made = [out] if several is None else [*out]
    if several in (None, list, tuple) and all(_is_plain(mode, each) for each in made):
        memory = {storage_id(tensor) for tensor in (*given, *made)}
        apart = len(memory) == len({*map(storage_id, given)}) + len(made)  # some ops hand on what they are given
        if apart and not any(tensor.storage_offset() for tensor in made):
            _put(key, (several, list(map(_Outline.of, made))))


def _put(key: Any, found: tuple[type | None, list[_Outline]] | None) -> None:
    if len(_remembered) < _MOST:
        _remembered[key] = found


def _made_again(mode: FakeTensorMode, several: type | None, outlines: list[_Outline]) -> Any:
    with in_fake_kernel(mode):
        new = [torch.empty_strided(o.shape, o.stride, dtype=o.dtype, device="meta") for o in outlines]
    made = [fake_of(mode, each, outline.device) for each, outline in zip(new, outlines, strict=True)]
    return made[0] if several is None else several(made)


def _view(mode: FakeTensorMode, op: Any, args: Sequence[Any]) -> Any:
    with in_fake_kernel(mode):
        out = op(*args)
    device = args[0].fake_device
    return [fake_of(mode, t, device) for t in out] if isinstance(out, list | tuple) else fake_of(mode, out, device)
