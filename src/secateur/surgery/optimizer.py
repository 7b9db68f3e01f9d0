"""An optimizer whose state follows a cut, so that training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.errors import ApplyError


class OptimizerCut:
    """The new state and parameter groups of an optimizer: made first, put in place at once, undoable."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kept: Mapping[int, Mapping[int, Sequence[int]]],
        new: Mapping[int, Tensor],
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ApplyError(f"optimizer= takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        self._optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._state = dict(optimizer.state)
        self._new_groups = [[new.get(id(p), p) for p in params] for params in self._groups]
        self._new_state = {
            new.get(id(p), p): self._follow(p, entry, kept.get(id(p))) for p, entry in self._state.items()
        }

    def _follow(self, param: Tensor, entry: Any, kept: Mapping[int, Sequence[int]] | None) -> Any:
        if kept is None or not isinstance(entry, dict):
            return entry
        return {key: self._cut(param, key, value, kept) for key, value in entry.items()}

    def _cut(self, param: Tensor, key: Any, value: Any, kept: Mapping[int, Sequence[int]]) -> Any:
        from secateur.surgery.cut import select

        if not isinstance(value, Tensor) or value.numel() <= 1:
            return value
        if value.shape == param.shape:
            return select(value, kept)
        raise ApplyError(
            f"{type(self._optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(param.shape)}, which cannot be cut along; make a new optimizer after the cut instead"
        )

    def carry_out(self) -> None:
        self._put(self._new_groups, self._new_state)

    def undo(self) -> None:
        self._put(self._groups, self._state)

    def _put(self, groups: list[list[Tensor]], state: Mapping[Any, Any]) -> None:
        for group, params in zip(self._optimizer.param_groups, groups, strict=True):
            group["params"][:] = params
        self._optimizer.state.clear()
        self._optimizer.state.update(state)
