"""Does the cut model compute what it should? Two oracles, neither of which shares code with what it checks.

- Exact cuts: zero every removed slice of the full-size model; its outputs must be those of the cut model.
- Other cuts: mark every removed slice of the full-size model as absent; statistics are taken over what is present.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import VerifyError
from secateur.plan.plan import Plan
from secateur.trace.capture import tensors_in
from secateur.verify.absent import NAN, Absence
from secateur.verify.run import outputs

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True)
class Expected:
    """What the cut model must put out, layer by layer where known."""

    outputs: list[Tensor]
    layers: list[tuple[str, list[Tensor]]]
    dtype: torch.dtype


def expected(model: nn.Module, plan: Plan, example: Any, *, absent: bool = False) -> Expected:
    """Run the full-size model with the removed slices zero (exact cuts) or absent (others, and on request).

    Absence is also what is left where zeros make no sense: a weight kept as direction and length has none of zero.
    """
    exact = all(axis.exact for axis in plan.axes) and not absent
    fill = 0.0 if exact else NAN

    def remove(name: str, tensor: Tensor) -> Tensor:
        for dim, index in plan.every_kept().get(name, {}).items():
            gone = torch.ones(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
            gone[list(index)] = False
            tensor.index_fill_(dim, gone.nonzero().flatten(), fill if tensor.is_floating_point() else 0)
        return tensor

    error: Exception | None = None
    unclear: Expected | None = None
    for dtype in (torch.float64, torch.float32):
        layers: list[tuple[str, list[Tensor]]] = []
        watch = None if exact else (lambda name, out, to=layers: to.append((name, list(tensors_in(out)))))
        within = None if exact else Absence(model, {place: value for place, _, value in plan.attributes})
        try:
            made = Expected(outputs(model, example, dtype, remove, within, watch), layers, dtype)
        except Exception as problem:  # the user's forward, in another precision than it knows
            error = problem
            continue
        if not any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in made.outputs):
            return made
        if exact:
            return expected(model, plan, example, absent=True)
        unclear = unclear or made  # some models put out NaN in double precision only
    if unclear is not None:
        return unclear
    raise VerifyError(
        f"the full-size model cannot be run for verification ({type(error).__name__}: {error}); "
        "pass verify=False to go without"
    ) from error


def check(model: nn.Module, example: Any, want: Expected) -> float:
    """The largest difference from what was expected, relative to its scale; raises where it is too large."""
    layers: list[tuple[str, list[Tensor]]] = []
    watch = None if not want.layers else (lambda name, out: layers.append((name, list(tensors_in(out)))))
    try:
        got = outputs(model, example, want.dtype, seen=watch)
    except Exception as problem:
        raise VerifyError(f"the cut model does not run: {type(problem).__name__}: {problem}") from problem
    worst = 0.0
    for a, b in zip(want.outputs, got, strict=True):
        difference = distance(a, b)
        if not difference <= _TOLERANCE[want.dtype]:
            raise VerifyError(
                f"the cut model's output differs by {difference:.2g} of its scale from what it should be; "
                f"{_first_difference(want, layers)}. The model is as it was. Please report this."
            )
        worst = max(worst, difference)
    return worst


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference between two tensors, of the scale of the first; infinite where shapes or gaps differ."""
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
    scale = a[finite].abs().max().item()
    return (a - b)[finite].abs().max().item() / (scale or 1.0)


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
