"""What sees a tracing run: every torch function with its sizes, and every ATen op below it.

Two levels are needed. Ops show what happens to positions, but they get plain numbers: torch turns every int into its
own on the way down. Functions get the numbers as the model's code passed them, with their origin, but hide which ops
they lead to. So the op level learns about layouts, and when a function returns, its size arguments are held against the
layouts that its tensors then have.
"""

import sys
import types
import weakref
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from secateur.axes import Layout, fix
from secateur.compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    TorchFunctionMode,
    is_functorch_wrapped,
    redispatch_function,
    takes_sizes,
    transform_level,
)
from secateur.ops.arguments import bound
from secateur.ops.asking import COUNTS, LENGTHS, SHAPE
from secateur.ops.record import alike, asked, function_record, is_op, part, record_of, sizes_of
from secateur.ops.value import known, layouts_of
from secateur.sizes.explain import is_capture
from secateur.sizes.size import Dim, Op, Size
from secateur.tracing.outlines import DEVICE, carried_out
from secateur.tracing.tracer import SEVERAL, Tracer, tensors_among

_BACK = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)  # whose sizes are those of the way there
_SIZELESS = {FakeTensor, Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device}
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class OpRecorder(TorchDispatchMode):
    """Sees every ATen op."""

    def __init__(self, tracer: Tracer, made: list[weakref.ref[Any]], mode: FakeTensorMode | None = None) -> None:
        super().__init__()
        self.tracer = tracer
        self._mode = mode  # of the fake tensors, if the run is on such
        self.made = made  # by the run
        self.strangers: list[Tensor] = []  # tensors that the model's code has from elsewhere
        self.suspended = False
        self.seen = False  # whether the torch function that leads to the present ops, with its sizes, was seen

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:  # half of all that is asked, and neither made nor learnt
            self.tracer.ops += not self.suspended
            return args[0].fake_device
        kwargs = kwargs or {}
        op = asked(func) if isinstance(func, OpOverload) else None
        watched = op is not None and not self.suspended
        if op is not None and watched and op.composed and record_of(func) is None:
            # In inference mode, composed ops arrive whole.
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        fake = op.fake if op is not None else part(func, "fake")
        stand_in = fake if fake is not None and isinstance(args[0] if args else None, FakeTensor) else None
        self.strangers += [t for t in tensors_among((args, kwargs) if kwargs else args) if known(t) is None]
        out = carried_out(self._mode, func, args, kwargs) if stand_in is None else stand_in(*args, **kwargs)
        self.made += map(weakref.ref, tensors_among((out,)))
        if watched:
            self.tracer.record(func, args, kwargs, out, seen=self.seen)
        return out


class FunctionRecorder(TorchFunctionMode):
    """Sees every torch function, with the sizes that it was called with still knowing where they came from."""

    def __init__(
        self,
        tracer: Tracer,
        ops: OpRecorder,
        contrary: Iterable[str] = (),
        watched: Collection[int] = (),
        reached: dict[int, set[int]] | None = None,
    ) -> None:
        super().__init__()
        self._watched, self._reached = watched, {} if reached is None else reached
        self.tracer = tracer
        self.ops = ops
        self.inside: list[Any] = []
        self.contrary = set(contrary)  # lines whose next decision by data comes out the other way

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._watched:
            self._note_frames()
        if type(func) is types.MethodWrapperType:  # an attribute of a tensor, which takes no numbers
            if func == SHAPE:
                return self.tracer.shape_of(args[0], func(*args))
            return self._run(func, args, kwargs, seen=True)
        if func in LENGTHS:
            return self._size(*bound(func, args, kwargs)[0])
        if func is Tensor.__len__:
            self._count_as_value(args[0])
        if func in _READS:
            self._read_out(func, args[0])
        if func is Tensor.__bool__ and self.contrary and (where := self.tracer.sizes.where()) in self.contrary:
            self.contrary.discard(where)  # once, or a loop would not end
            return not func(*args)
        like = alike(func)
        whole = function_record(like)
        if whole is not None:
            return self._as_a_whole(whole, func, args, kwargs)
        signature = sizes_of(like)
        if signature is None and isinstance(func, types.FunctionType) and func not in (*self.inside, *_BACK):
            self.inside.append(func)
            try:
                with self:
                    return redispatch_function(func, kinds, args, kwargs)
            finally:
                self.inside.pop()
        hidden = is_op(like) and takes_sizes(like)
        # Where vmap maps a dimension, the model's code counts others than the ops do, so its numbers fit none of these.
        given = (args, kwargs) if kwargs else args
        mapped = transform_level() is not None and _has_ints(given)
        elsewhere = mapped and any(map(is_functorch_wrapped, tensors_among(given)))
        out = self._run(func, args, kwargs, seen=not hidden and not elsewhere)
        if signature is not None:
            placed, others = bound(func, args, kwargs)
            signature(self.tracer.sizes, out, *placed, **others)
        elif like in COUNTS:
            return self._numel(bound(func, args, kwargs)[0][0], out)
        self._loose_sizes(func, given)
        self.tracer.sizes.account(getattr(func, "__name__", "") or str(func), partial(_layouts_among, given))
        return out

    def _note_frames(self) -> None:
        """Where the code that is watched is now."""
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and not is_capture(frame):
            if id(frame.f_code) in self._watched:
                self._reached.setdefault(id(frame.f_code), set()).add(frame.f_lasti)
            frame = frame.f_back

    def _run(self, func: Any, args: Any, kwargs: Any, *, seen: bool) -> Any:
        self.ops.seen = seen
        try:
            return func(*args, **kwargs)
        finally:
            self.ops.seen = False

    def _count_as_value(self, x: Tensor) -> None:
        """`len` answers with a plain int, which will not tell what it is used for."""
        value = known(x)
        if value is not None and value.dims:
            self.tracer.sizes.on_value(Dim(value.dims[0]), "len()")

    def _read_out(self, func: Any, x: Tensor) -> None:
        value = known(x)
        for dim in value.dims if value is not None else ():
            fix(dim, f"{func.__name__}: its elements leave torch ({self.tracer.sizes.where()})")

    def _size(self, x: Tensor, dim: int | None = None) -> Any:
        shape = self.tracer.shape_of(x, x.shape)
        return shape if dim is None else shape[dim]

    def _numel(self, x: Tensor, count: int) -> int:
        value = known(x)
        if value is None or not value.dims:
            return count
        expr: Any = Dim(value.dims[0])
        for dim in value.dims[1:]:
            expr = Op("*", expr, Dim(dim))
        return self.tracer.sizes.size(count, expr)

    def _as_a_whole(self, record: Any, func: Any, args: Any, kwargs: Any) -> Any:
        self.ops.suspended = True
        try:
            out = func(*args, **kwargs)
        finally:
            self.ops.suspended = False
        self.tracer.whole(record, alike(func), *bound(func, args, kwargs), out)
        return out

    def _loose_sizes(self, func: Any, given: Any) -> None:
        """A size that arrives where no size is expected is a number like any other."""
        if isinstance(given, Size):
            self.tracer.sizes.loose(given, getattr(func, "__name__", "") or str(func))
        elif isinstance(given, SEVERAL):
            for item in given:
                if type(item) not in _SIZELESS:
                    self._loose_sizes(func, item)
        elif isinstance(given, dict):
            for item in given.values():
                self._loose_sizes(func, item)


def _has_ints(items: Any) -> bool:
    if isinstance(items, SEVERAL):
        return any(map(_has_ints, items))
    if isinstance(items, dict):
        return any(map(_has_ints, items.values()))
    return isinstance(items, int) and not isinstance(items, bool)


def _layouts_among(items: Any) -> list[Layout]:
    return [layout for tensor in tensors_among(items) for layout in layouts_of(tensor)]
