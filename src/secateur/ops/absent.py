"""What ops compute when some positions are absent, which NaN stands for.

Elementwise ops carry NaN along by themselves. Ops that sum, average or normalise skip what is absent, and an element is
absent when nothing that it is made of is present. Nothing here knows of axes: it is what cuts are checked against.
"""

import math
from typing import Any

import torch
from torch import Tensor

NAN = math.nan


def gone(x: Tensor) -> Tensor:
    """Where a tensor is absent; one of whole numbers, or a sparse one, has no way to say so."""
    if x.layout is not torch.strided:
        return torch.zeros((), dtype=torch.bool, device=x.device)
    # not by isnan, which answers a model that nothing is missing
    return x != x if x.is_floating_point() or x.is_complex() else torch.zeros_like(x, dtype=torch.bool)


def filled(x: Tensor, value: float = 0.0) -> Tensor:
    """Something that does not count in the place of what is absent."""
    return x.masked_fill(gone(x), value)


def mark(out: Tensor, where: Tensor) -> Tensor:
    """NaN where something is absent."""
    return out.masked_fill(where, NAN) if out.is_floating_point() or out.is_complex() else out


def count(x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    """How many elements along some dimensions are present."""
    return (~gone(x)).to(x.dtype if x.is_floating_point() else torch.float64).sum(dim, keepdim=keepdim)


def bilinear(op: Any, *args: Any, **kwargs: Any) -> Tensor:
    """An op that is linear in each of its tensors, over what is present; a result is where any of its terms is."""
    tensors = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
    sparse = next((i for i, t in enumerate(tensors) if t.layout is not torch.strided), None)

    def run(given: list[Tensor]) -> Tensor:
        rest = iter(given)
        return op(*(next(rest) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args), **kwargs)

    if sparse is not None:  # beside which nothing but whole lines of the other can be absent
        dense = tensors[1 - sparse]
        out = run([t if t.layout is not torch.strided else filled(t) for t in tensors])
        return mark(out, absent_lines(dense, [sparse - 2]))
    out = run([filled(t) for t in tensors])
    if any(bool(gone(t).any()) for t in tensors):
        out = out.masked_fill(run([(~gone(t)).to(t.dtype) for t in tensors]) == 0, NAN)
    return out


def still_absent(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """An op that writes into a tensor, or into a copy of it: what was absent still is."""
    before = gone(x)
    out = op(x, *args, **kwargs)
    return out.masked_fill_(before, NAN) if out is x else mark(out, before)


def absent_lines(x: Tensor, over: list[int]) -> Tensor:
    """Where nothing along some dimensions is present; these stay, with one position."""
    found = gone(x)
    for dim in over:
        found = found.all(dim, keepdim=True)
    return found
