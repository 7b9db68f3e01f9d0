"""Calls of modules that a run need not make again.

To take a run up at op k the model's code is called again, up to there for nothing. In a deep model that is the most of
it. So a module whose ops were all computed before is not called: what it gave back is handed out once more. That is
done where the call, as one whole run shows, did nothing but to make its result: it was given tensors and plain values,
none of which it changed, it left all that it holds as it was, and nobody listens to it with a hook.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur.calibrate.forms import Done, StoredView, to_forms
from secateur.compat import without_modes
from secateur.state.held import ATOMS
from secateur.state.transaction import Transaction

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class ModuleCall(NamedTuple):
    """A call of a module: the number of the op after it, and its result with forms in the place of tensors."""

    end: int
    out: Any


Calls = dict[
    tuple[int, int], ModuleCall | None
]  # by the number of the first op and the module's id; None: not to be told


class _StrangeError(Exception):
    """Something other than tensors and plain values."""


def leaves(value: Any) -> Iterator[Any]:
    """What containers hold; raises on anything but tensors and plain values."""
    if type(value) in (tuple, list):
        for each in value:
            yield from leaves(each)
    elif type(value) is dict:
        for key, each in value.items():
            yield key
            yield from leaves(each)
    elif isinstance(value, Tensor) or type(value) in ATOMS or type(value) is int:
        yield value
    else:
        raise _StrangeError


class WatchedCall:
    """A call of a module that is about to be made, to be told afterwards whether it did more than make its result."""

    def __init__(self, module: nn.Module, given: Any) -> None:
        self._given = given
        self._leaves: list[Any] | None = None
        self._before: Transaction | None = None
        try:
            self._leaves = list(leaves(given))
        except _StrangeError:
            return
        if not any(map(_listened_to, module.modules())):
            with without_modes():
                self._before = Transaction(module)

    def result(self, out: Any, ops: list[Done], form: Callable[[Tensor], StoredView | None]) -> Any:
        """What the call made, with forms in the place of tensors; None if it did more, or made something else."""
        if self._before is None or self._leaves is None:
            return None
        turned = any(torch.Tag.inplace_view in getattr(done.op, "tags", ()) for done in ops)
        try:
            given, made = list(leaves(self._given)), list(leaves(out))
        except _StrangeError:
            return None
        tensors = [each for each in made if isinstance(each, Tensor)]
        if turned or len(given) != len(self._leaves) or not all(map(operator.is_, given, self._leaves)):
            return None
        if not tensors or any(form(tensor) is None for tensor in tensors):
            return None
        with without_modes():
            return to_forms(out, form) if self._before.holds() else None


def _listened_to(module: nn.Module) -> bool:
    """Whether other code runs when a module is called."""
    return "forward" in module.__dict__ or any(module.__dict__.get(name) for name in _HOOKS)
