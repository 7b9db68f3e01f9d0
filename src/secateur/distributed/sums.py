"""What ranks know or have added up each by itself, put together: with the same bits on every rank."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from secateur.distributed.batches import described, sent
from secateur.distributed.meeting import group, meet, ranks

Key = TypeVar("Key")


def totals(what: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums over all ranks of tensors of which each rank has as many; on one process, as they are.

    >>> totals("counting", [torch.ones(2)])
    [tensor([1., 1.])]

    A rank that has nothing to add to one has zeros, in any shape that broadcasts. One rank adds up and tells the
    others, so that all have the same bits.
    """
    if ranks() == 1:
        return list(tensors)
    said = [json.loads(each) for each in meet(what, json.dumps([list(tensor.shape) for tensor in tensors]))]
    made = []
    for tensor, shapes in zip(tensors, zip(*said, strict=True), strict=True):
        plain = tensor.detach().cpu().expand(torch.broadcast_shapes(*shapes)).contiguous().clone()
        dist.reduce(plain, 0, group=group())
        dist.broadcast(plain, 0, group=group())
        made.append(plain.to(tensor.device))
    return made


def pooled(what: str, known: Mapping[Key, Any], device: torch.device | str = "cpu") -> dict[Key, Any]:
    """What any rank knows, known by all: of several, by that of the first; on one process, as it is.

    >>> pooled("telling", {("weight", 0): torch.ones(2)})
    {('weight', 0): tensor([1., 1.])}

    Keys are plain values and tuples of these, what is known is as a batch may be; what comes from others is put on
    `device`.
    """
    if ranks() == 1:
        return dict(known)
    keys = [dict.fromkeys(ast.literal_eval(each)) for each in meet(what, repr(list(known)))]
    owners: dict[Key, int] = {}
    for rank, each in enumerate(keys):
        owners |= {key: rank for key in each if key not in owners}
    lacking = [key for key in owners if any(key not in each for each in keys)]
    got: dict[Key, Any] = {}
    if lacking:
        mine = {key: list[Tensor]() for key in lacking if owners[key] == dist.get_rank()}
        forms = [described(known[key], tensors) for key, tensors in mine.items()]
        told = [iter(json.loads(each)) for each in meet(f"{what}: telling", json.dumps(forms))]
        where = torch.device(device)
        got = {key: sent(next(told[owners[key]]), mine.get(key), owners[key], where) for key in lacking}
    return {key: known[key] if rank == dist.get_rank() or key not in got else got[key] for key, rank in owners.items()}


__all__ = ["pooled", "totals"]
