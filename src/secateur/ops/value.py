"""What is known of a tensor during the tracing run, and of one op that makes tensors from tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.axes import Atom, Layout, constant, fix, leak, note, resolve, unify
from secateur.sizes.explain import Explainer

_KEY = "_secateur_value"
SPACE = "takes it for a dimension of space"  # why a dimension that windows slide over stays


class Storage:
    """Shared by a tensor and its views: what is known of everything that was written into it."""

    __slots__ = ("dirty", "made_of", "whole")

    def __init__(self, whole: Value) -> None:
        self.whole = whole  # what is known of all of it; others are views
        self.dirty = False  # whether it may be non-zero at removed positions
        self.made_of: frozenset[str] | None = None  # the model's tensors that it is made of; None: data has part in it

    def write(self, before: Value, after: Value) -> None:
        """Something was written: harmless when all of it is as much zero as it was, or the write is zero everywhere."""
        same = before is self.whole and before.shape == after.shape
        if same and all(now or not was for was, now in zip(before.zero, after.zero, strict=True)):
            self.whole = after
        elif not all(after.zero):
            self.dirty = True


class Value:
    """A tensor: the layout of each dimension, and along which ones removed positions are known to hold zeros."""

    __slots__ = ("_constant", "_zero", "alike", "boolean", "dims", "rows", "storage", "used")

    def __init__(self, dims: Iterable[Layout], zero: Iterable[bool] | bool = True, alike: bool = False) -> None:
        self.dims = tuple(dims)
        self.alike = alike  # every element is the same, or drawn the same way
        self.rows: list[Layout] | None = None  # the last dimension of each row, while rows are not tied together
        self.boolean = False  # a mask: used as an index, it picks as many positions as are true
        self._zero = (zero,) * len(self.dims) if isinstance(zero, bool) else tuple(zero)
        self.storage = Storage(self)
        self._constant = False
        self.used = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    @property
    def zero(self) -> tuple[bool, ...]:
        """Along which dimensions the tensor is zero at removed positions."""
        return (False,) * len(self.dims) if self.storage.dirty else self._zero

    def is_zero(self, dim: int) -> bool:
        """Whether the tensor is zero at the removed positions of a dimension."""
        return self.zero[dim]

    def tie_rows(self) -> None:
        """The rows are used together: their last dimensions are one."""
        rows, self.rows = self.rows or (), None
        for row in rows:
            unify(self.dims[-1], row)

    def constant(self) -> bool:
        """Whether no dimension can be cut. Once true it stays true."""
        if not self._constant:
            self._constant = all(constant(resolve(dim)) for dim in self.dims)
        return self._constant


def bind(tensor: Tensor, value: Value) -> Value:
    """Remember what is known of a tensor, with the tensor itself."""
    value.boolean = tensor.dtype == torch.bool
    tensor.__dict__[_KEY] = value
    return value


def forget(tensor: Tensor) -> None:
    """Leave a tensor as it was before anything was known of it."""
    tensor.__dict__.pop(_KEY, None)


def value_of(tensor: Tensor) -> Value:
    """What is known of a tensor that an op is given; one never seen before is somebody's constant."""
    found = tensor.__dict__.get(_KEY)
    if found is None:
        reason = (
            "a tensor made outside of the model's parameters and buffers; register it (nn.ModuleList, "
            "register_buffer), or call the model once before, if its first call makes layers"
        )
        found = bind(tensor, Value([Atom(n, reason) for n in tensor.shape]))
    found.used = True
    return found


def known(tensor: Any) -> Value | None:
    """What is known of a tensor, if anything is that still fits it."""
    found = tensor.__dict__.get(_KEY) if isinstance(tensor, Tensor) else None
    return found if found is not None and len(found.dims) == tensor.ndim else None


def layouts_of(tensor: Any) -> tuple[Layout, ...]:
    """The layouts of a tensor's dimensions, as far as they are known."""
    value = known(tensor)
    return value.dims if value is not None else ()


class Call:
    """One op of the tracing run, as its record sees it."""

    __slots__ = ("_where", "itemsize", "name", "op", "outs", "sizes", "summed")

    def __init__(self, sizes: Explainer, op: Any, name: str, outs: Sequence[Tensor]) -> None:
        self.sizes = sizes
        self.op = op
        self.name = name
        self.outs = [tuple(out.shape) for out in outs]
        self.itemsize = outs[0].dtype.itemsize if outs else 1  # bytes of an element of the first output
        self.summed: list[tuple[Layout, frozenset[str] | None]] = []  # dimension, and the weights that read it
        self._where: str | None = None  # the line of the model's code, once that was asked for

    @property
    def shape(self) -> tuple[int, ...]:
        return self.outs[0]

    def fixed(self, size: int, reason: str = "makes it anew") -> Atom:
        """A dimension that no cut can change."""
        return Atom(size, self.reason(reason) if size > 1 else self.name)

    def fresh(self, size: int) -> Atom:
        """A new axis, whose size the function that was called must explain."""
        return self.sizes.fresh(size)

    def fix(self, layout: Layout, reason: str) -> None:
        if not constant(resolve(layout)):
            fix(layout, self.reason(reason))

    def note(self, layout: Layout, reason: str) -> None:
        """Cutting this is not exact."""
        if self.sizes.judges and not constant(resolve(layout)):
            note(layout, self.reason(reason))

    def reason(self, text: str) -> str:
        if self._where is None:
            self._where = self.sizes.where()
        return f"{self.name}: {text}" + (f" ({self._where})" if self._where else "")

    def opaque(self, *values: Value, reason: str) -> None:
        """Fix everything: what happens to positions is not expressible."""
        for value in values:
            for dim in value.dims:
                self.fix(dim, reason)

    def contract(self, *places: tuple[Value, int]) -> None:
        """Sum over a dimension of the product of the values that have it."""
        layouts = [value.dims[i] for value, i in places]
        zero = [value.is_zero(i) for value, i in places]
        for layout in layouts[1:]:
            unify(layouts[0], layout)
        self._read(places)
        if not any(zero):
            self.note(layouts[0], "sums over removed positions that are not zero")
        if self.sizes.judges and not all(zero):
            leak(layouts[0])

    def _read(self, places: Sequence[tuple[Value, int]]) -> None:
        """Remember the weight that reads data here; None where data meets data, or weights meet weights."""
        weights = [(value.dims[i], value.storage.made_of) for value, i in places if value.storage.made_of is not None]
        single = len(places) == 2 and len(weights) == 1
        self.summed.append(weights[0] if single else (places[0][0].dims[places[0][1]], None))

    def sums(self, layout: Layout, *values: Value) -> None:
        """Remember a sum over data that is not a weight's reading of it."""
        if any(value.storage.made_of is None for value in values):
            self.summed.append((layout, None))

    def reduce(self, x: Value, i: int, needs_zero: bool = True) -> None:
        """Reduce a dimension; exact when removed positions are zero and the reduction ignores zeros."""
        self.sums(x.dims[i], x)
        if not needs_zero:
            self.note(x.dims[i], "takes a statistic over it")
        elif not x.is_zero(i):
            self.note(x.dims[i], "sums over removed positions that are not zero")

    def broadcast(self, *values: Value, to: Sequence[int] | None = None) -> tuple[Layout, ...]:
        """The layouts of the elementwise result of values, each aligned to the right; of a shape, or the op's own."""
        dims: list[Layout] = []
        shape = self.shape if to is None else to
        for back in range(-len(shape), 0):
            size = shape[back]
            same = [v.dims[back] for v in values if len(v.dims) >= -back and v.dims[back].size == size]
            for other in same[1:]:
                unify(same[0], other)
            dims.append(same[0] if same else self.fixed(size))
        return tuple(dims)
