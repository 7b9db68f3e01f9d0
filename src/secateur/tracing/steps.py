"""What ran, one op after the other, with layouts in the place of tensors: enough to run each op alone, at any size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.axes import Layout
from secateur.ops.value import Value
from secateur.sizes.size import plain


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that an op was given; `weight`: it is made of the model's own tensors alone."""

    dims: tuple[Layout, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weight: bool


@dataclass(frozen=True, eq=False)
class TimedOp:
    """One op, or a torch function that is seen as a whole, and its arguments with an `Operand` for each tensor."""

    run: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def operands(self) -> Iterator[Operand]:
        """The tensors among the arguments, in order."""
        return _operands((self.args, tuple(self.kwargs.values())))


def step(run: Any, args: Any, kwargs: dict[str, Any], value: Callable[[Tensor], Value]) -> TimedOp:
    """A call, as it is remembered."""

    def noted(item: Any) -> Any:
        if isinstance(item, Tensor):
            known = value(item)
            strides = tuple(item.stride()) if item.layout is torch.strided else ()
            return Operand(known.dims, strides, item.dtype, item.device, known.storage.made_of is not None)
        if isinstance(item, list | tuple):
            return tuple(noted(part) for part in item)
        return plain(item) if isinstance(item, int) and not isinstance(item, bool) else item

    return TimedOp(run, noted(args), {key: noted(item) for key, item in kwargs.items()})


def _operands(item: Any) -> Iterator[Operand]:
    if isinstance(item, Operand):
        yield item
    elif isinstance(item, tuple):
        for part in item:
            yield from _operands(part)
