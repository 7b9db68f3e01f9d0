"""Numbers that follow a cut: what the cut model gives torch functions, given to the full-size model's in their place.

A number that is made of a size (`math.log(x.shape[-1])`, `len(x)`) is another one after the cut. The full-size model
that stands for the cut one must then compute with that other number, and it cannot know it by itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from secateur.compat import TorchFunctionMode
from secateur.tracing.rehearsal import NumberCall, Numbers, is_number_argument
from secateur.verify.absence import Count, counting
from secateur.verify.run import Values, outputs


def numbers_of(model: nn.Module, example: Any, dtype: torch.dtype, values: Values | None = None) -> list[NumberCall]:
    """The plain numbers that a model gives torch functions, call by call."""
    return [call for call in way_of(model, example, dtype, values=values).calls if call[1]]


def way_of(
    model: nn.Module,
    example: Any,
    dtype: torch.dtype,
    known: Sequence[NumberCall] | None = None,
    values: Values | None = None,
) -> Numbers:
    """The modules that a model runs and the functions that it calls, compared with those of a known run."""
    seen: list[Numbers] = []

    def watching(other: nn.Module) -> Numbers:
        seen.append(Numbers(other, known))
        return seen[-1]

    outputs(model, example, dtype, within=watching, seen=lambda name, _: seen[-1].entered(name), values=values)
    return seen[-1]


class Replayed(TorchFunctionMode):
    """Gives torch functions the numbers of another run; fails where that called others."""

    def __init__(self, calls: Sequence[NumberCall]) -> None:
        super().__init__()
        self._calls = iter(calls)

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not counting.get() and any(True for _ in _counted((args, kwargs))):
            name, numbers = next(self._calls)
            left = list(numbers)
            if name != getattr(func, "__name__", "") or len(left) != sum(1 for _ in _counted((args, kwargs))):
                raise RuntimeError("with other sizes the model calls other functions")
            args, kwargs = _replaced(args, left), _replaced(kwargs, left)
        return func(*args, **kwargs)


def _counted(items: Any) -> Any:
    for item in items.values() if isinstance(items, dict) else items:
        if is_number_argument(item):
            yield item
        elif type(item) in (tuple, list, dict, torch.Size):
            yield from _counted(item)


def _replaced(item: Any, numbers: list[Any]) -> Any:
    """Arguments with the next numbers in the place of plain ones; sizes that know what they will be stay."""
    if is_number_argument(item):
        number = numbers.pop(0)
        return item if isinstance(item, Count) else number
    if type(item) is dict:
        return {key: _replaced(value, numbers) for key, value in item.items()}
    if type(item) in (tuple, list, torch.Size):
        return type(item)([_replaced(value, numbers) for value in item])
    return item
