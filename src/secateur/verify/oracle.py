"""Does the cut model compute what it should? Two oracles, neither of which shares code with what it checks.

- Exact cuts: zero every removed slice of the full-size model; its outputs must be those of the cut model.
- Other cuts: mark every removed slice of the full-size model as absent; statistics are taken over what is present.

A layer norm shows why there are two. It divides by the spread of all features, and removed ones that are zero still
count in it, so the full-size model with zeros is not what the cut one should compute. With the removed features absent
(NaN, see `absence`) each op leaves them out by itself, and the full-size model says what a cut one must put out.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import SecateurWarning, VerifyError
from secateur.ops.absent import NAN
from secateur.planning.plans import Plan
from secateur.state.held import Place, named_tensors
from secateur.tracing.examples import tensors_in
from secateur.tracing.rehearsal import NumberCall
from secateur.verify.absence import Absence
from secateur.verify.experts import Closed, ParameterStorages
from secateur.verify.numbers import Replayed
from secateur.verify.run import Values, Within, outputs

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_GAP = 13  # powers of two
_ZERO = -5000  # below the power of two of any number


@dataclass(frozen=True)
class Expected:
    """What the cut model must put out, layer by layer where known."""

    outputs: list[Tensor]
    layers: list[tuple[str, list[Tensor]]]
    dtype: torch.dtype


def expected(
    model: nn.Module,
    plan: Plan,
    example: Any,
    *,
    absent: bool = False,
    numbers: Sequence[NumberCall] | None = None,
    values: Values | None = None,
) -> Expected:
    """Run the full-size model with the removed slices zero (exact cuts) or absent (others, and on request).

    `numbers` are those that the cut model gives torch functions, where they are made of sizes; `values` gives those of
    parameters that have none here. Absence is also what is left where zeros make no sense: a weight kept as direction
    and length has none of zero.
    """
    if values is None and any(tensor.is_meta for _, tensor in named_tensors(model)):
        raise VerifyError(
            f"{type(model).__name__} is on the meta device and has no values to prove the cut with; load them first, "
            "or pass verify=False to cut the shapes"
        )
    exact = all(axis.exact for axis in plan.axes) and not absent
    fill = 0.0 if exact else NAN

    def remove(name: str, tensor: Tensor) -> Tensor:
        for dim, index in plan.kept_everywhere().get(name, {}).items():
            gone = torch.ones(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
            gone[list(index)] = False
            tensor.index_fill_(dim, gone.nonzero().flatten(), fill if tensor.is_floating_point() else 0)
        return tensor

    stored = ParameterStorages()
    stay = {name: plan.kept[name][0] for name in plan.routers if 0 in plan.kept.get(name, {})}

    def changed(name: str, tensor: Tensor) -> Tensor:
        return stored.note(name, remove(name, tensor)) if name in stay else remove(name, tensor)

    sizes = {place: value for place, _, value in plan.attributes}
    error: Exception | None = None
    unclear: Expected | None = None
    for dtype in (torch.float64, torch.float32):
        layers: list[tuple[str, list[Tensor]]] = []
        watch = None if exact else (lambda name, out, to=layers: to.append((name, list(tensors_in(out)))))
        absence = (lambda _: nullcontext()) if exact else (lambda other: _absence(other, sizes, numbers))
        within = partial(_without_experts, absence, Closed(stored, stay)) if stay else absence
        try:
            made = Expected(outputs(model, example, dtype, changed, within, watch, values), layers, dtype)
        except Exception as problem:  # the user's forward, in another precision than it knows
            error = problem
            continue
        if not any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in made.outputs):
            return made
        if exact:
            return expected(model, plan, example, absent=True, values=values)
        unclear = unclear or made  # some models put out NaN in double precision only
    if unclear is not None:
        return unclear
    raise VerifyError(
        f"the full-size model cannot be run for verification ({type(error).__name__}: {error}); "
        "pass verify=False to go without"
    ) from error


@contextmanager
def _without_experts(within: Within, closed: Closed, model: nn.Module) -> Iterator[None]:
    with within(model), closed:
        yield


def _absence(model: nn.Module, sizes: Mapping[Place, int], numbers: Sequence[NumberCall] | None) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(Absence(model, sizes))
    if numbers is not None:
        stack.enter_context(Replayed(numbers))
    return stack


def check(model: nn.Module, example: Any, want: Expected, values: Values | None = None) -> float:
    """The largest difference from what was expected, relative to its scale; raises where it is too large."""
    layers: list[tuple[str, list[Tensor]]] = []
    watch = None if not want.layers else (lambda name, out: layers.append((name, list(tensors_in(out)))))
    try:
        got = outputs(model, example, want.dtype, seen=watch, values=values)
    except Exception as problem:
        raise VerifyError(f"the cut model does not run: {type(problem).__name__}: {problem}") from problem
    if len(got) != len(want.outputs):
        raise VerifyError(f"the cut model puts out {len(got)} tensors, not {len(want.outputs)}. The model is as it was")
    worst = 0.0
    for a, b in zip(want.outputs, got, strict=True):
        difference = distance(a, b)
        if not difference <= _TOLERANCE[want.dtype]:
            raise VerifyError(
                f"the cut model's output differs by {difference:.2g} of its scale from what it should be; "
                f"{_first_difference(want, layers)}. The model is as it was. Please report this."
            )
        worst = max(worst, difference)
    _say_what_was_not_compared(want.outputs)
    return worst


def _say_what_was_not_compared(outputs: list[Tensor]) -> None:
    """A comparison of nothing proves nothing: a detector may find nothing in an example."""
    empty = [f"output {i} is empty" for i, a in enumerate(outputs) if a.numel() == 0]
    empty += [f"output {i} is NaN after the cut" for i, a in enumerate(outputs) if a.numel() and bool(a.isnan().all())]
    if not empty:
        return
    what = f"on the example {', '.join(empty[:3])}{' …' if len(empty) > 3 else ''}, so there was nothing to compare"
    remedy = "trace with an example on which the model puts out numbers"
    if len(empty) == len(outputs):
        raise VerifyError(
            f"{what}: the cut is not proved; {remedy}, cut less, or pass verify=False. The model is as it was"
        )
    warnings.warn(f"{what} there; {remedy} everywhere to prove all of the cut", SecateurWarning, stacklevel=2)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference between two tensors, of the scale of the first; infinite where shapes or gaps differ.

    >>> logits = torch.tensor([1.0, 2.0, -1e9], dtype=torch.float64)
    >>> round(distance(logits, logits + torch.tensor([1.0, 0.0, 0.0])), 3)
    0.5

    Each element is judged by the elements of its own order of magnitude: a mask of -1e9 does not hide the others.
    """
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if bool((a == b).all()) else float("inf")
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    finite = a.isfinite() & b.isfinite()
    if not bool((finite | same).all()):
        return float("inf")
    a, b, same = a[finite], b[finite], same[finite]
    size, off = torch.maximum(a.abs(), b.abs()), (a - b).abs()
    eps = torch.finfo(a.dtype).eps
    return max(
        off[among].max().item() / _scale(size, same, among, eps) for among in _magnitudes(size) if not same[among].all()
    )


def _magnitudes(size: Tensor) -> Iterator[Tensor]:
    """Masks of elements of like size: nothing lies in the four orders of magnitude between two of these groups."""
    exponent = torch.frexp(size).exponent.masked_fill(size == 0, _ZERO)
    found = exponent.unique().tolist()
    starts = [e for before, e in pairwise([2 * _ZERO, *found]) if e - before > _GAP]
    for start, end in pairwise([*starts, -_ZERO]):
        yield (exponent >= start) & (exponent < end)


def _scale(size: Tensor, same: Tensor, among: Tensor, eps: float) -> float:
    """What differences among some elements are measured by: their own size, and a little of the larger ones that they
    may be the difference of. What is the same in both, as masks are, or larger than digits reach, is none of these."""
    own = size[among].max().item()
    others = size[~same & (size <= own / eps)]
    larger = max(own, others.max().item()) if others.numel() else own
    return own + 1e-2 * (larger - own) + 1e-6 * min(1.0, size.max().item())


def _first_difference(want: Expected, layers: list[tuple[str, list[Tensor]]]) -> str:
    for (name, big), (other, small) in zip(want.layers, layers, strict=False):
        if name != other:
            return f"from {other or 'the model'} on another path is taken"
        for a, b in zip(big, small, strict=False):
            if a.is_floating_point() and (
                a[~a.isnan()].numel() != b.numel() or distance(a[~a.isnan()], b.flatten()) > _TOLERANCE[want.dtype]
            ):
                return f"the first layer that differs is {name or 'the model itself'}"
    return "no single layer shows it"
