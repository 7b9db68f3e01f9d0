"""What follows each product of a run: a norm that sets its scale, a residual stream that it is added to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import Product, Watch, call
from secateur.trace.capture import tensors_in

aten = torch.ops.aten

NORMS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}
_ADDS = {aten.add.Tensor, aten.add_.Tensor}
_SCALES = {aten.mul.Tensor, aten.mul_.Tensor}
_KEEP_ORDER = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
}
_WEIGHTS = {aten.mm.default: 1, aten.bmm.default: 1, aten.addmm.default: 2, aten.convolution.default: 1}
_TAG = "_secateur_came"
_MADE_OF = "_secateur_made_of"


@dataclass(frozen=True)
class Norm:
    """A batch norm in eval mode, by the names of its tensors."""

    mean: str
    var: str | None
    weight: str | None
    eps: float


@dataclass(frozen=True)
class Came:
    """Where a tensor came from: the op that made it and, if only scales and shifts lie between, a product."""

    made_at: int
    product: str | None = None
    product_at: int = 0
    norm: Norm | None = None
    scales: tuple[str, ...] = ()  # parameters that it was multiplied with on the way


@dataclass(frozen=True)
class Residual:
    """The stream that a product's result, scaled, is added to: what op number `other` made, before the product."""

    other: int
    norm: Norm | None
    scales: tuple[str, ...]


@dataclass
class Structure:
    """How often each parameter is multiplied with data, the norm behind it and the stream that it is added to."""

    products: Counter[str] = field(default_factory=Counter)
    norms: dict[str, Norm] = field(default_factory=dict)
    residuals: dict[str, Residual] = field(default_factory=dict)
    means: Counter[str] = field(default_factory=Counter)  # how often each batch norm is used
    derived: set[str] = field(default_factory=set)  # parameters that are not themselves multiplied with data, but
    # what is made of them alone is: masked, normalised, put together


def structure(model: nn.Module, example: Any) -> Structure:
    """Run a model once and see what follows each of its products."""
    recorder = _Recorder(model)
    with recorder.watch:
        call(model, example)
    return recorder.found


class _Recorder:
    """Follows one run. What is known of a tensor is pinned to it."""

    def __init__(self, model: nn.Module) -> None:
        self.found = Structure()
        self.watch = Watch(model, self._on_product, self._on_op)
        self._ops = 0

    def _on_product(self, product: Product, run: Any) -> Any:
        self.found.products[product.name] += 1
        out = run()
        self._ops += 1
        channels_second = out.ndim == 2 or product.op is aten.convolution.default
        out.__dict__[_TAG] = Came(self._ops, product.name, self._ops) if channels_second else Came(self._ops)
        return out

    def _on_op(self, op: Any, args: Any, _kwargs: Any, run: Any) -> Any:
        came = [_came(arg) for arg in args[:2]]  # before an op in place changes it
        made_of = self._made_of(op, args)
        out = run()
        self._ops += 1
        first = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(first, Tensor) and first.dtype.is_floating_point:
            first.__dict__[_TAG] = self._follow(op, args, came) or Came(self._ops)
            first.__dict__[_MADE_OF] = made_of
        return out

    def _made_of(self, op: Any, args: Any) -> frozenset[str]:
        """The parameters of which alone an op makes something; what it multiplies data with is noted."""
        found = {id(tensor): self._parts(tensor) for tensor in tensors_in(args)}
        at = _WEIGHTS.get(op)
        if at is not None and not self._parts(args[at - 1]):
            self.found.derived |= found[id(args[at])]
        return frozenset().union(*found.values()) if all(found.values()) else frozenset()

    def _parts(self, tensor: Tensor) -> frozenset[str]:
        name = self.watch.parameters.name(tensor)
        return tensor.__dict__.get(_MADE_OF, frozenset()) if name is None else frozenset({name})

    def _follow(self, op: Any, args: Any, came: list[Came | None]) -> Came | None:
        if op in NORMS:
            return self._norm(args, came[0])
        if op in _KEEP_ORDER and came[0] is not None:
            return replace(came[0], made_at=self._ops)
        if op in _ADDS | _SCALES and len(args) == 2:
            return self._combine(op, args, came)
        return None

    def _norm(self, args: Any, came: Came | None) -> Came | None:
        name = self.watch.parameters.name
        mean = name(args[3])
        if mean is None:
            return None
        self.found.means[mean] += 1
        if came is None or came.product is None or came.norm is not None or came.scales:
            return None
        norm = Norm(mean, name(args[4]), name(args[1]), float(args[7]))
        self.found.norms[came.product] = norm
        return replace(came, made_at=self._ops, norm=norm)

    def _combine(self, op: Any, args: Any, came: list[Came | None]) -> Came | None:
        for mine, other in ((0, 1), (1, 0)):
            own, there = came[mine], came[other]
            if own is None or own.product is None or not isinstance(args[other], Tensor):
                continue
            name = self.watch.parameters.name(args[other])
            if name is not None and args[other].ndim == 1:
                scales = (*own.scales, name) if op in _SCALES else own.scales
                return replace(own, made_at=self._ops, scales=scales)
            before = there is not None and there.made_at < own.product_at
            if op in _ADDS and there is not None and before and args[0].shape == args[1].shape:
                residual = Residual(there.made_at, own.norm, own.scales)
                self.found.residuals.setdefault(own.product, residual)
                return None
        return None


def _came(tensor: Any) -> Came | None:
    return tensor.__dict__.get(_TAG) if isinstance(tensor, Tensor) else None
