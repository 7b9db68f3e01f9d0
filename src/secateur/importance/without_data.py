"""Criteria that need nothing but the weights, and chance, the baseline that every criterion must beat."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.arguments import SEED, Rule, a_number, check_fields
from secateur.errors import PlanError
from secateur.importance.criterion import Criterion, JointCriterion
from secateur.importance.weights import Context, Sums, Weights, as_real
from secateur.tracing.graph import Axis

NORM = a_number(above=0, most=1000)  # p of a p-norm
_DISTANCE = Rule(f"{NORM.says}, or infinity", lambda p: NORM.holds(p) or (isinstance(p, float) and p == math.inf))


@dataclass(frozen=True)
class Magnitude(JointCriterion):
    """The p-norm of everything that goes when a position goes.

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    >>> net[0].weight.data, net[1].weight.data = torch.tensor([[3.0], [0.0]]), torch.tensor([[4.0, 2.0]])
    >>> sec.plan(sec.trace(net, torch.zeros(1, 1)), sec.Ratio(0.5), importance=Magnitude()).axes[0].keep  # 5 and 2
    (0,)
    """

    p: float = 2.0

    def __post_init__(self) -> None:
        check_fields(self, PlanError, p=NORM)

    def powers(self, weight: Tensor, out: Tensor) -> Tensor:
        """|w|^p."""
        return torch.square(weight, out=out) if self.p == 2 else torch.abs(weight, out=out).pow_(self.p)

    def scores(self, weights: Weights) -> dict[Axis, Tensor]:
        """(Σ |w|^p)^(1/p) over all weights that go with a position."""
        return {axis: sums.pow(1 / self.p) for axis, sums in weights.sum(self.powers).items()}


@dataclass(frozen=True)
class LAMP(JointCriterion):
    """Σ|w|^p of a position over that of all positions of its axis that are not smaller (Lee et al., 2021; p = 2).

    >>> LAMP().adapted(torch.tensor([1.0, 4.0, 3.0]))
    tensor([0.1250, 1.0000, 0.4286], dtype=torch.float64)

    The largest of every axis scores 1, so that a ranking across axes leaves something of each. Within an axis the
    order is that of `Magnitude(p)`.
    """

    p: float = 2.0

    def __post_init__(self) -> None:
        check_fields(self, PlanError, p=NORM)

    def adapted(self, powers: Tensor) -> Tensor:
        """Each value over the sum of those that are not smaller; of equals, the first counts as the larger."""
        falling, order = powers.to(torch.float64).sort(descending=True, stable=True)
        shares = falling / falling.cumsum(0)
        shares[falling == 0] = 0.0
        shares[falling.isinf()] = 1.0
        return torch.empty_like(shares).index_copy_(0, order, shares)

    def scores(self, weights: Weights) -> dict[Axis, Tensor]:
        """Magnitudes, adapted axis by axis."""
        norms = Magnitude(self.p).scores(weights)
        return {axis: self.adapted(norm.pow(self.p)) for axis, norm in norms.items()}


@dataclass(frozen=True)
class BNScale(JointCriterion):
    """The absolute scale that norms give to a position; its weights' magnitude where there is no norm.

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 1), torch.nn.BatchNorm2d(3), torch.nn.Conv2d(3, 1, 1))
    >>> net[1].weight.data = torch.tensor([0.1, -2.0, 1.0])
    >>> sec.plan(sec.trace(net, torch.zeros(1, 1, 4, 4)), sec.Ratio(0.4), importance=sec.BNScale()).axes[0].keep
    (1, 2)
    """

    def scores(self, weights: Weights) -> dict[Axis, Tensor]:
        """Σ |γ| over the norms of a position."""

        def scales(name: str, weight: Tensor, _: Sequence[int]) -> Sums:
            return {0: weight.detach().abs().to("cpu", torch.float64)} if name in weights.norms else {}

        known = weights.norms & weights.parameters.keys()
        found = weights.gather(scales)
        others = [axis for axis in weights.axes if not any(site.tensor in known for site in axis.sites)]
        return {**found, **Magnitude().scores(weights.of(others))}


@dataclass(frozen=True)
class FPGM(Criterion):
    """The sum of a position's distances to all others of its axis, over what makes it.

    >>> FPGM().distances(torch.tensor([[0.0], [1.0], [5.0]]))
    tensor([6., 5., 9.], dtype=torch.float64)
    """

    p: float = 2.0

    def __post_init__(self) -> None:
        check_fields(self, PlanError, p=_DISTANCE)

    def distances(self, rows: Tensor) -> Tensor:
        """Σ_j ‖row_i − row_j‖_p for each row i, a few rows at a time."""
        rows = rows.detach().to(torch.float64)
        step = max(1, 2**24 // max(rows.numel(), 1))
        return torch.cat([torch.cdist(part, rows, p=self.p).sum(1) for part in rows.split(step)])

    def __call__(self, context: Context) -> Tensor:
        axis = context.axis
        total = torch.zeros(axis.size, dtype=torch.float64)
        weights = [(site, weight) for site, weight in context.sites() if weight.ndim > 1]
        makers = [(site, weight) for site, weight in weights if site.dim == 0] or weights
        for site, weight in makers:
            slices = as_real(weight.detach().cpu()).movedim(site.dim, 0).flatten(1)
            for owner in context.owners(site.tensor, site.dim):
                mine = owner.argsort(stable=True)[int((owner < 0).sum()) :]
                total += self.distances(slices[mine].reshape(axis.size, -1))
        return total


@dataclass(frozen=True)
class Random(Criterion):
    """Uniform scores, the same for the same seed and axis on every machine.

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> one, two = (sec.plan(graph, sec.Ratio(0.5), importance=sec.Random(7)) for _ in range(2))
    >>> one == two
    True
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, PlanError, seed=SEED)

    def __call__(self, context: Context) -> Tensor:
        seed = zlib.crc32(f"{self.seed} {context.axis.name}".encode())
        return torch.rand(context.axis.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
