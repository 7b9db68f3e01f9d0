"""Weight magnitude: what is small matters little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.axes import Atom, free_atoms
from secateur.importance.criterion import Criterion
from secateur.importance.gather import Context, collect
from secateur.trace.graph import Site

_CHUNK = 2**17  # elements at a time: what fits into a core's cache


@dataclass(frozen=True)
class Magnitude(Criterion):
    """The p-norm of everything that goes when a position goes.

    >>> Magnitude(p=1).slices(torch.tensor([[1.0, -2.0], [0.0, 0.5]]), 0)
    tensor([3.0000, 0.5000], dtype=torch.float64)
    """

    p: float = 2.0

    def slices(self, weight: Tensor, dim: int) -> Tensor:
        """Σ |w|^p of each slice of a tensor along a dimension."""
        return self.sums(weight, (dim,))[dim]

    def sums(self, weight: Tensor, dims: Sequence[int], space: Tensor | None = None) -> dict[int, Tensor]:
        """Σ |w|^p of each slice along each of some dimensions, in one pass over the tensor.

        `space` is memory to work in, which it makes for itself where that is not enough.
        """
        weight = weight.detach()
        total = {d: torch.zeros(weight.shape[d], dtype=torch.float64, device=weight.device) for d in dims}
        along = next((d for d, size in enumerate(weight.shape) if size > 1), 0)
        rows = weight.shape[along]
        step = max(1, _CHUNK * rows // max(weight.numel(), 1))
        most = 3 * step * weight.numel() // (2 * max(rows, 1))  # powers, and sums of two or more of them
        space = _space(weight, most) if space is None or len(space) < most else space
        for start in range(0, rows, step):
            part = weight.narrow(along, start, min(step, rows - start))
            powers = self._powers(part, max(dims), space)
            for d in dims:
                others = [other for other in range(powers.ndim) if other != d]
                found = powers.sum(others) if others else powers
                (total[d][start : start + len(found)] if d == along else total[d]).add_(found)
        return total

    def _powers(self, part: Tensor, last: int, space: Tensor) -> Tensor:
        """Σ |w|^p over all dimensions beyond the last that counts."""
        out = space[: part.numel()].view(part.shape)
        if self.p == 2 and part.dtype == out.dtype:
            torch.mul(part, part, out=out)
        else:
            out.copy_(part)
            _ = out.mul_(out) if self.p == 2 else out.abs_().pow_(self.p)
        lines = out.flatten(last + 1) if last + 1 < out.ndim else out[..., None]
        if lines.shape[-1] == 1:
            return lines[..., 0]
        lines = lines.view(-1, lines.shape[-1])
        sums = space[part.numel() : part.numel() + len(lines)]
        return torch.mv(lines, lines.new_ones(lines.shape[-1]), out=sums).view(part.shape[: last + 1])

    def __call__(self, context: Context) -> Tensor:
        """A score per position of the axis."""
        memo = context.memo

        def scores(site: Site, parameter: Tensor) -> Tensor:
            layouts = context.layouts[site.tensor]
            sums = memo.setdefault((self, site.tensor), {})
            if site.dim not in sums:
                cut = [d for d, layout in enumerate(layouts) if free_atoms(layout)]
                # Small results between large, passing memory would keep the allocator from using that again.
                key = ("space", parameter.dtype, parameter.device)
                space = memo[key] if key in memo else memo.setdefault(key, _space(parameter, 3 * _CHUNK // 2))
                sums.update({d: found.cpu() for d, found in self.sums(parameter, cut, space).items()})
            return sums.pop(site.dim) if isinstance(layouts[site.dim], Atom) else sums[site.dim]

        return collect(context, scores).pow(1 / self.p)


def _space(like: Tensor, size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.promote_types(like.dtype, torch.float32))
