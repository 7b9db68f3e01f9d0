"""What follows each product of a run: a norm that sets its scale, a residual stream that it is added to."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from secateur.calibrate.products import ParameterProduct, Part
from secateur.calibrate.resume import Step
from secateur.calibrate.stages import Runs
from secateur.ops.norm import BATCH_NORMS
from secateur.ops.pointwise import SCALES, SUMS
from secateur.ops.record import part
from secateur.ops.view import KEEP_ORDER
from secateur.tracing.examples import tensors_in

_TAG = "_secateur_origin"
_MADE_OF = "_secateur_made_of"


@dataclass(frozen=True)
class Norm:
    """A batch norm in eval mode, by the names of its tensors."""

    mean: str
    var: str | None
    weight: str | None
    eps: float
    bias: str | None = None


@dataclass(frozen=True)
class TensorOrigin:
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
    parts: set[Part] = field(default_factory=set)  # what of each is multiplied with data
    norms: dict[str, Norm] = field(default_factory=dict)
    residuals: dict[str, Residual] = field(default_factory=dict)
    means: Counter[str] = field(default_factory=Counter)  # how often each batch norm is used
    norms_at: dict[str, int] = field(default_factory=dict)  # the number of its op
    variances: dict[str, str] = field(default_factory=dict)  # the name of its variance
    derived: set[str] = field(default_factory=set)  # parameters that are not themselves multiplied with data, but
    # what is made of them alone is: masked, normalised, put together

    def two_ways(self) -> frozenset[str]:
        """The parameters that data are multiplied with both as they are and transposed."""
        ways = Counter((name, offset) for name, offset, _ in self.parts)
        return frozenset(name for (name, _), n in ways.items() if n > 1)


def structure(runs: Runs) -> Structure:
    """Run a model once and see what follows each of its products."""
    recorder = _Recorder(runs)
    runs.record(recorder)
    return recorder.found


class _Recorder:
    """Follows one run. What is known of a tensor is pinned to it."""

    def __init__(self, runs: Runs) -> None:
        self.found = Structure()
        self._name = runs.parameters.name
        self._ops = 0

    def __call__(self, step: Step) -> Any:
        self._ops = step.number
        product = step.product
        return self._on_op(step.op, step.args, step.run) if product is None else self._on_product(product, step.run)

    def _on_product(self, product: ParameterProduct, run: Any) -> Any:
        self.found.products[product.name] += 1
        self.found.parts.add(product.part)
        out = run()
        channels_second = out.ndim == 2 or len(product.of.places) > 1
        out.__dict__[_TAG] = (
            TensorOrigin(self._ops, product.name, self._ops) if channels_second else TensorOrigin(self._ops)
        )
        return out

    def _on_op(self, op: Any, args: Any, run: Any) -> Any:
        # before an op in place changes it
        origins = [arg.__dict__.get(_TAG) if isinstance(arg, Tensor) else None for arg in args[:2]]
        made_of = self._made_of(op, args)
        out = run()
        first = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(first, Tensor) and first.dtype.is_floating_point:
            first.__dict__[_TAG] = self._follow(op, args, origins) or TensorOrigin(self._ops)
            first.__dict__[_MADE_OF] = made_of
        return out

    def _made_of(self, op: Any, args: Any) -> frozenset[str]:
        """The parameters of which alone an op makes something; what it multiplies data with is noted."""
        found = {id(tensor): self._parts(tensor) for tensor in tensors_in(args)}
        view = part(op, "product")
        if view is not None and not self._parts((of := view(*args)).data):
            self.found.derived |= found[id(of.weight)]
        return frozenset().union(*found.values()) if all(found.values()) else frozenset()

    def _parts(self, tensor: Tensor) -> frozenset[str]:
        name = self._name(tensor)
        return tensor.__dict__.get(_MADE_OF, frozenset()) if name is None else frozenset({name})

    def _follow(self, op: Any, args: Any, origins: list[TensorOrigin | None]) -> TensorOrigin | None:
        if op in BATCH_NORMS:
            return self._norm(args, origins[0])
        if op in KEEP_ORDER and origins[0] is not None:
            return replace(origins[0], made_at=self._ops)
        if op in SUMS | SCALES and len(args) == 2:
            return self._combine(op, args, origins)
        return None

    def _norm(self, args: Any, origin: TensorOrigin | None) -> TensorOrigin | None:
        name = self._name
        mean = name(args[3])
        if mean is None:
            return None
        self.found.means[mean] += 1
        self.found.norms_at[mean] = self._ops
        variance = name(args[4])
        if variance is not None:
            self.found.variances[mean] = variance
        if origin is None or origin.product is None or origin.norm is not None or origin.scales:
            return None
        norm = Norm(mean, variance, name(args[1]), float(args[7]), name(args[2]))
        self.found.norms[origin.product] = norm
        return replace(origin, made_at=self._ops, norm=norm)

    def _combine(self, op: Any, args: Any, origins: list[TensorOrigin | None]) -> TensorOrigin | None:
        for mine, other in ((0, 1), (1, 0)):
            own, there = origins[mine], origins[other]
            if own is None or own.product is None or not isinstance(args[other], Tensor):
                continue
            name = self._name(args[other])
            if name is not None and args[other].ndim == 1:
                scales = (*own.scales, name) if op in SCALES else own.scales
                return replace(own, made_at=self._ops, scales=scales)
            before = there is not None and there.made_at < own.product_at
            if op in SUMS and there is not None and before and args[0].shape == args[1].shape:
                residual = Residual(there.made_at, own.norm, own.scales)
                self.found.residuals.setdefault(own.product, residual)
                return None
        return None
