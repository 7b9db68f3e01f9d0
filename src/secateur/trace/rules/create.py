"""Tensors made in `forward`. Where all elements are alike, a dimension can follow a cut; otherwise it is fixed."""

from __future__ import annotations

from typing import Any

import torch

from secateur.axes import Atom
from secateur.trace.registry import rule
from secateur.trace.value import Call, Value

aten = torch.ops.aten


@rule(
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.rand.default,
    aten.randn.default,
    aten.randint.default,
    aten.randint.low,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.scalar_tensor.default,
    creates=True,
)
def alike(call: Call, *_: Any, **__: Any) -> Value:
    """Every element is alike (or drawn alike), wherever it is."""
    return Value([call.fresh(n) for n in call.shape], "zeros" in call.name or "empty" in call.name, alike=True)


@rule(
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.logspace.default,
    aten.eye.default,
    aten.eye.m,
    aten.randperm.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
    aten.hann_window.default,
    creates=True,
)
def counted(call: Call, *_: Any, **__: Any) -> Value:
    """Each element depends on its position, so positions cannot go."""
    reason = call.reason("each element depends on its position")
    return Value([Atom(n, reason) for n in call.shape], False)


@rule(aten.one_hot.default)
def one_hot(call: Call, x: Value, classes: int = -1) -> Value:
    """A new last dimension of classes."""
    return Value([*x.dims, call.fixed(call.shape[-1], "classes")], False)
