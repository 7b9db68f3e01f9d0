"""Where zeros may be: anywhere, N of every M, or whole blocks. Values that sparsity in one shot and training share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.arguments import Rule, a_number, an_int, check, check_fields
from secateur.errors import PlanError
from secateur.prune.selection import Segment, drop_smallest

_WIDEST = 2**15 - 1  # of how many at most some are kept


class Pattern(ABC):
    """A rule for where the zeros of a weight are: a function from a score per entry to what stays.

    >>> NM(2, 4).mask(torch.tensor([[1.0, 4.0, 3.0, 2.0]]))
    tensor([[False,  True,  True, False]])

    Scores are zero or more; of equal ones, the first go. A weight is as linear layers and convolutions hold it: outputs
    first, then what is summed over. `dim` says which dimension holds the inputs where that is another than the second.
    """

    @property
    @abstractmethod
    def sparsity(self) -> float:
        """The fraction of zeros."""

    @abstractmethod
    def mask(self, scores: Tensor, dim: int = 1) -> Tensor:
        """True where an entry stays."""

    @abstractmethod
    def at(self, sparsity: float) -> Pattern:
        """The same kind of pattern with another fraction of zeros."""

    def fits(self, shape: torch.Size | tuple[int, ...], dim: int = 1) -> str | None:
        """Why a weight of this shape cannot have the pattern; None where it can."""
        return None


_SPARSITY = Rule("the fraction of zeros, from 0 to below 1", a_number(least=0, below=1).holds)


def smallest_dropped(scores: Tensor, count: int) -> Tensor:
    """True for all entries but the `count` with the smallest scores."""
    exact = scores.detach().contiguous()
    mask = torch.empty_like(exact if exact.is_floating_point() else exact.float())
    drop_smallest([Segment(exact, mask, fresh=True)], count)
    return mask.bool()


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Zeros anywhere: the fraction `sparsity` of each weight.

    >>> Unstructured(0.5).mask(torch.tensor([[1.0, 4.0], [3.0, 2.0]]))
    tensor([[False,  True],
            [ True, False]])
    """

    sparsity: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self, PlanError, sparsity=_SPARSITY)

    def mask(self, scores: Tensor, dim: int = 1) -> Tensor:
        """All but the smallest scores, over the whole weight."""
        return smallest_dropped(scores, round(self.sparsity * scores.numel()))

    def at(self, sparsity: float) -> Unstructured:
        """Another fraction."""
        return Unstructured(sparsity)


@dataclass(frozen=True)
class NM(Pattern):
    """At most `n` of every `m` consecutive inputs are not zero: 2:4 is what GPUs with sparse tensor cores compute with.

    >>> NM(1, 2).mask(torch.tensor([[1.0, 4.0, 3.0, 2.0]]))
    tensor([[False,  True,  True, False]])
    >>> NM(2, 4).sparsity
    0.5
    """

    n: int = 2
    m: int = 4

    def __post_init__(self) -> None:
        check_fields(self, PlanError, n=an_int(1), m=an_int(1, _WIDEST))
        if self.n > self.m:
            raise PlanError(f"NM(n, m) keeps n of every m, so n is at most m; got NM({self.n}, {self.m})")

    @property
    def sparsity(self) -> float:
        """The fraction of zeros."""
        return 1 - self.n / self.m

    def mask(self, scores: Tensor, dim: int = 1) -> Tensor:
        """The `n` largest of every `m` along the inputs."""
        _require(self, scores, dim)
        grouped = scores.detach().movedim(dim, -1).unflatten(-1, (-1, self.m))
        larger = torch.zeros(grouped.shape, dtype=torch.int16, device=scores.device)  # how many of its m are
        for j in range(self.m):  # several times faster than to sort groups as small as these
            other = grouped[..., j : j + 1]
            larger[..., :j] += other >= grouped[..., :j]
            larger[..., j:] += other > grouped[..., j:]
        return (larger < self.n).flatten(-2).movedim(-1, dim)

    def at(self, sparsity: float) -> NM:
        """Another n of the same m, with at least this fraction of zeros as near as it can be."""
        check("NM", PlanError, {"sparsity": sparsity}, sparsity=_SPARSITY)
        return NM(max(1, round((1 - sparsity) * self.m)), self.m)

    def fits(self, shape: torch.Size | tuple[int, ...], dim: int = 1) -> str | None:
        """The inputs have to be a multiple of m."""
        if len(shape) < 2:
            return f"it has {len(shape)} dimension, and {self.n}:{self.m} is along the inputs of a matrix"
        return None if shape[dim] % self.m == 0 else f"its {shape[dim]} inputs are no multiple of {self.m}"


@dataclass(frozen=True)
class Block(Pattern):
    """Zeros in whole blocks of `height` outputs by `width` inputs; the fraction `sparsity` of the blocks.

    >>> Block(1, 2, 0.5).mask(torch.tensor([[1.0, 4.0, 3.0, 1.0]]))
    tensor([[ True,  True, False, False]])

    A block counts by the sum of its scores.
    """

    height: int = 4
    width: int = 1
    sparsity: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self, PlanError, height=an_int(1), width=an_int(1), sparsity=_SPARSITY)

    def mask(self, scores: Tensor, dim: int = 1) -> Tensor:
        """All but the blocks with the smallest sums."""
        _require(self, scores, dim)
        first, second = _matrix(dim)
        tiles = scores.detach().movedim((first, second), (0, 1))
        rest = tiles.shape[2:]
        tiles = tiles.reshape(-1, self.height, tiles.shape[1] // self.width, self.width, *rest)
        sums = tiles.sum((1, 3), keepdim=True)
        mask = smallest_dropped(sums, round(self.sparsity * sums.numel())).expand_as(tiles)
        return mask.flatten(0, 1).flatten(1, 2).movedim((0, 1), (first, second))

    def at(self, sparsity: float) -> Block:
        """Another fraction of the same blocks."""
        return Block(self.height, self.width, sparsity)

    def fits(self, shape: torch.Size | tuple[int, ...], dim: int = 1) -> str | None:
        """Outputs and inputs have to be made of whole blocks."""
        if len(shape) < 2:
            return f"it has {len(shape)} dimension, and blocks are parts of a matrix"
        first, second = _matrix(dim)
        whole = shape[first] % self.height == 0 and shape[second] % self.width == 0
        sizes = f"{shape[first]}×{shape[second]} is not made of blocks of {self.height}×{self.width}"
        return None if whole else sizes


def _matrix(dim: int) -> tuple[int, int]:
    """The dimensions of outputs and inputs, given that of the inputs."""
    return (0, dim) if dim != 0 else (1, 0)


def _require(pattern: Pattern, scores: Tensor, dim: int) -> None:
    why = pattern.fits(scores.shape, dim)
    if why is not None:
        raise PlanError(f"a weight of shape {tuple(scores.shape)} cannot be {pattern}: {why}")
