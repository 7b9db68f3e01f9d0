"""What a model computes when some positions are absent.

A removed position is NaN. Elementwise ops carry that along by themselves; ops that look at more than one element do so
over what is present, as their records say (`secateur.ops`, the part `absent`). The full-size model, run this way, must
put out what the cut model does, whether the cut is exact or not. Nothing here knows of axes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from secateur.compat import TorchDispatchMode, TorchFunctionMode, redispatch_function
from secateur.nn.attention import forward
from secateur.ops.absent import gone
from secateur.ops.arguments import bound, with_numbers
from secateur.ops.asking import COUNTS, LENGTHS, SHAPE
from secateur.ops.create import EMPTY
from secateur.ops.pointwise import TAKE_NUMBERS
from secateur.ops.record import alike, function_record, part
from secateur.state.held import Place, Walk
from secateur.state.patches import UNSCRIPTED, Patch, patched

# counts that change ------------------------------------------------------------------------------------------


class Count(int):
    """An int that is a size now and, used as a number, what it will be after the cut."""

    after: Callable[[], int]

    def __new__(cls, now: Any, after: Callable[[], int] | None = None) -> Count:
        if after is None:  # code that wants a number of the same type, as `type(n)(2)` does
            return int(now)  # type: ignore[return-value]
        self = super().__new__(cls, now)
        self.after = after
        return self

    def __float__(self) -> float:
        return float(self.after())

    def __truediv__(self, other: Any) -> Any:
        return self.after() / _after(other)

    def __rtruediv__(self, other: Any) -> Any:
        return _after(other) / self.after()

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __deepcopy__(self, memo: Any) -> Count:
        return self

    def __reduce__(self) -> Any:
        return int, (int.__index__(self),)


def _after(value: Any) -> Any:
    return value.after() if isinstance(value, Count) else value


def _whole(name: str, swapped: bool) -> None:
    compute = getattr(operator, name)

    def method(self: Count, other: Any) -> Any:
        a, b = (other, self) if swapped else (self, other)
        if isinstance(other, float) or (name == "pow" and (isinstance(b, float) or b < 0)):
            return compute(_after(a), _after(b))
        if not isinstance(other, int):
            return NotImplemented
        now = compute(int.__index__(a), int.__index__(b))
        return Count(now, lambda: compute(_after(a), _after(b)))

    setattr(Count, f"__{'r' if swapped else ''}{name}__", method)


for _name in ("add", "sub", "mul", "floordiv", "mod", "pow"):
    _whole(_name, swapped=False)
    _whole(_name, swapped=True)


counting: ContextVar[bool] = ContextVar("counting", default=False)  # whether functions are ours, not the model's


def present_along(x: Tensor, dim: int) -> int:
    """How many positions of a dimension hold anything."""
    token = counting.set(True)
    try:
        if not x.is_floating_point() or x.numel() == 0:
            return x.shape[dim]
        there = ~gone(x).movedim(dim, 0).flatten(1) if x.ndim > 1 else ~gone(x).unsqueeze(1)
        return int(there.any(1).sum())
    finally:
        counting.reset(token)


class AbsentOps(TorchDispatchMode):
    """Every op that looks at more than one element, done over what is present."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        over_present = part(func, "absent")
        if over_present is None or not any(isinstance(a, Tensor) and gone(a).any() for a in args):
            out = func(*args, **(kwargs or {}))
            return out.zero_() if func in EMPTY else out  # it may hold NaN by chance, which means nothing
        return over_present(func, *args, **(kwargs or {}))


class AbsentFunctions(TorchFunctionMode):
    """Functions whose kernels would hide a sum or a size, spelled out; sizes that know what they will be."""

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[Any] = []

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == SHAPE:
            return self._shape(args[0])
        if func in LENGTHS:
            (x, *dim), _ = bound(func, args, kwargs)
            return self._shape(x)[dim[0]] if dim else self._shape(x)
        if func in COUNTS:
            return self._numel(bound(func, args, kwargs)[0][0])
        like = alike(func)
        if function_record(like) is not None:
            spelled_out = part(like, "absent")
            assert spelled_out is not None
            args, kwargs = bound(func, args, kwargs)
            with self:
                return spelled_out(like, *args, **kwargs)
        if isinstance(func, FunctionType) and func not in self._inside:
            return self._looked_into(func, kinds, args, kwargs)
        if func in TAKE_NUMBERS:
            args, kwargs = tuple(map(_after, args)), {k: _after(v) for k, v in kwargs.items()}
        elif any(isinstance(given, Count) for given in (*args, *kwargs.values())):
            args, kwargs = with_numbers(func, args, kwargs, _after)
        return func(*args, **kwargs)

    def _looked_into(self, func: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        """A function that is written in Python, with what it calls seen again."""
        self._inside.append(func)
        try:
            with self:
                return redispatch_function(func, kinds, args, kwargs)
        finally:
            self._inside.pop()

    def _numel(self, x: Tensor) -> int:
        sizes = [Count(n, partial(present_along, x, i)) for i, n in enumerate(tuple(x.size()))]
        return math.prod(sizes) if sizes else 1

    def _shape(self, x: Tensor) -> torch.Size:
        return torch.Size([Count(n, partial(present_along, x, i)) for i, n in enumerate(tuple(x.size()))])


def _scale_before(attention: nn.MultiheadAttention) -> float:
    """What scores are multiplied with before the cut, and after it."""
    return 1 / math.sqrt(int.__index__(attention.head_dim))


def _unchecked(self: Distribution, *shapes: Any, **kwargs: Any) -> None:
    _distribution(self, *shapes[:2], **{**kwargs, "validate_args": False})


_distribution = Distribution.__init__
_UNCHECKED: Patch = (Distribution, "__init__", _unchecked)  # which would take what is absent for a mistake
_ATTENTION: Patch = (nn.MultiheadAttention, "forward", forward(_scale_before))


class Absence(ExitStack):
    """The context in which a full-size model computes with absent positions."""

    def __init__(self, model: nn.Module, attributes: Mapping[Place, int]) -> None:
        super().__init__()
        self._model = model
        self._attributes = attributes

    def __enter__(self) -> Absence:
        super().__enter__()
        Walk(self._model).replace(
            lambda value, place: Count(value, lambda: self._attributes[place]) if place in self._attributes else value
        )
        self.enter_context(patched(_ATTENTION, _UNCHECKED, UNSCRIPTED))
        self.enter_context(AbsentOps())
        self.enter_context(AbsentFunctions())
        return self
