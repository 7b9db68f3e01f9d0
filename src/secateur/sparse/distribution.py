"""How dense each weight is by its shape alone, so that all together have a given fraction of zeros."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.sparse.spread import Spread, Spreading


class Distribution(Spread):
    """A function from the shapes of all weights and the sparsity of all to the density of each."""

    @abstractmethod
    def densities(self, shapes: Sequence[Sequence[int]], sparsity: float) -> list[float]:
        """The part of each weight that is not zero."""

    def sparsities(self, model: nn.Module, names: Sequence[str], sparsity: float, batches: Sequence[Any]) -> Spreading:
        """By shapes alone."""
        found = self.densities([model.get_parameter(name).shape for name in names], sparsity)
        return {name: 1 - density for name, density in zip(names, found, strict=True)}

    def counts(self, shapes: Sequence[Sequence[int]], sparsity: float) -> list[int]:
        """How many entries of each weight are not zero: one at least."""
        sizes = [math.prod(shape) for shape in shapes]
        dense = self.densities(shapes, sparsity)
        return [min(size, max(1, round(part * size))) for part, size in zip(dense, sizes, strict=True)]

    def random(self, shapes: Sequence[torch.Size], sparsity: float, chance: torch.Generator) -> list[Tensor]:
        """Masks at random."""
        found = []
        for shape, count in zip(shapes, self.counts(shapes, sparsity), strict=True):
            mask = torch.zeros(math.prod(shape), dtype=torch.bool)
            mask[torch.randperm(len(mask), generator=chance)[:count]] = True
            found.append(mask.view(shape))
        return found


@dataclass(frozen=True)
class Uniform(Distribution):
    """The same for every layer.

    >>> Uniform().densities([(10, 10), (1000, 10)], 0.9)
    [0.09999999999999998, 0.09999999999999998]
    """

    def densities(self, shapes: Sequence[Sequence[int]], sparsity: float) -> list[float]:
        return [1 - sparsity for _ in shapes]


@dataclass(frozen=True)
class ERK(Distribution):
    """Small layers denser than large ones, as random graphs of Erdős and Rényi are, kernels included.

    >>> [round(part, 3) for part in ERK().densities([(10, 10), (1000, 10)], 0.9)]
    [0.196, 0.099]

    The density of a layer is in proportion to the sum of its sizes over their product, and at most one. Mocanu et al.
    (2018) for linear layers; with kernels, Evci et al., "Rigging the lottery" (2020).
    """

    def densities(self, shapes: Sequence[Sequence[int]], sparsity: float) -> list[float]:
        sizes = [math.prod(shape) for shape in shapes]
        raw = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
        whole: set[int] = set()  # layers that no factor leaves room for: these stay dense
        while True:
            rest = [i for i in range(len(shapes)) if i not in whole]
            wanted = (1 - sparsity) * sum(sizes) - sum(sizes[i] for i in whole)
            factor = wanted / sum(raw[i] * sizes[i] for i in rest) if rest else 0.0
            over = {i for i in rest if factor * raw[i] > 1}
            if not over:
                return [1.0 if i in whole else max(0.0, factor * raw[i]) for i in range(len(shapes))]
            whole |= over
