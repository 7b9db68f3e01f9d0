"""Mixtures of experts, as a run shows them: which weight scores the experts of which some are then chosen.

A router is a weight with a row for each expert: its product with a token is scored further, element by element or by a
softmax, and the experts of the highest scores are taken. An expert that is gone is one that is never chosen: its score
is minus infinity from the start. That is what a model with fewer experts is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.compat import TorchDispatchMode, storage_id
from secateur.ops.pointwise import same
from secateur.ops.product import is_product
from secateur.ops.record import record_of
from secateur.ops.reduce import topk
from secateur.tracing.examples import tensors_in


@dataclass(frozen=True)
class Router:
    """A weight that scores experts, how many there are, and how many of them each token goes to."""

    weight: str
    experts: int
    chosen: int


class ParameterStorages:
    """The tensors of a model by the memory that they are in, also where an op reads a view of one."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._held: list[Tensor] = []

    def note(self, name: str, tensor: Tensor) -> Tensor:
        """Remember a tensor; the same tensor, so that this can stand where others change it."""
        if tensor.layout is torch.strided and not tensor.is_meta:
            self._names.setdefault(storage_id(tensor), name)
            self._held.append(tensor)
        return tensor

    def read(self, op: Any, args: Sequence[Any], out: Any) -> str | None:
        """The tensor that a product of data with one of the model's reads; what casts one is followed."""
        given = [storage_id(a) for a in args if isinstance(a, Tensor) and a.ndim > 1 and a.layout is torch.strided]
        name = next((self._names[key] for key in given if key in self._names), None)
        if name is not None and record_of(op) is same:
            self.note(name, out)
        return name if is_product(op) else None


class Routed(TorchDispatchMode):
    """A run that shows the routers: `chose(router, experts)` is called with the numbers of the experts taken."""

    def __init__(self, stored: ParameterStorages, chose: Callable[[Router, Tensor], object]) -> None:
        super().__init__()
        self._stored, self._chose = stored, chose
        self._scores: dict[int, tuple[str, int]] = {}  # by identity: whose scores a tensor is, and of how many
        self._held: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        weight = self._stored.read(func, args, out)
        scored = next((self._scores[id(t)] for t in tensors_in((args, kwargs or {})) if id(t) in self._scores), None)
        if weight is not None:
            scored = weight, out.shape[-1]
        if scored is None:
            return out
        name, experts = scored
        if record_of(func) is topk and args[0].shape[-1] == experts:
            self._chose(Router(name, experts, args[1]), out[1])
            return out
        for tensor in tensors_in(out):
            if tensor.is_floating_point() and tensor.ndim and tensor.shape[-1] == experts:
                self._scores[id(tensor)] = name, experts
                self._held.append(tensor)
        return out


class Closed(TorchDispatchMode):
    """A run in which some experts are never chosen: {the name of a router: the numbers of the experts that stay}."""

    def __init__(self, stored: ParameterStorages, stay: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self._stored, self._stay = stored, stay

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        stay = self._stay.get(self._stored.read(func, args, out) or "")
        if stay is None:
            return out
        gone = torch.ones(out.shape[-1], dtype=torch.bool, device=out.device)
        gone[list(stay)] = False
        return out.masked_fill(gone, float("-inf"))


__all__ = ["Closed", "Routed", "Router", "ParameterStorages"]
