"""Inputs of another kind that a caller may give: further ones, and some with more or fewer dimensions.

    def forward(self, x, *skips): ...
        if x.ndim == 3: ...

Both are tried only where the code asks: for what follows in a list of arguments, or for the number of dimensions.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from secateur.tracing.examples import arguments, mapped, tensors_in
from secateur.tracing.forced import Forced
from secateur.tracing.stated import is_users

_COUNTS = re.compile(r"\.ndim\b|\.(n?dim|ndimension)\(\)|len\([\w.]+\.(shape|size\(\))\)")


def further(model: nn.Module, example: Any) -> Iterator[Any]:
    """An example with one more tensor, the first one once again, where forward takes any number and was given none."""
    args, kwargs = arguments(example)
    kinds = [p.kind for p in inspect.signature(model.forward).parameters.values()]
    several, named = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_OR_KEYWORD
    if several in kinds and is_users(type(model)) and kinds.index(several) == len(args) == kinds.count(named):
        yield from ((*args, tensor) for tensor in [*tensors_in(args)][:1] if not kwargs)


def asks_for_dims(one: Forced) -> bool:
    """Whether a test on the way to a branch asks how many dimensions something has."""
    return any(_COUNTS.search(ast.unparse(test)) for test in one.branch.tests)


def with_other_dims(example: Any) -> Iterator[Any]:
    """An example without the first dimension of its tensors, and with one more before it."""
    tensors = [*tensors_in(example)]
    if all(tensor.ndim > 1 for tensor in tensors):
        yield mapped(example, _first)
    yield mapped(example, lambda tensor: tensor.unsqueeze(0))


def _first(tensor: Tensor) -> Tensor:
    return tensor[0]


__all__ = ["asks_for_dims", "further", "with_other_dims"]
