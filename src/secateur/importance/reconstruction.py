"""What the layers that read a position lose when it goes and their remaining weights are refitted.

A position matters as much as what only it can express. Of two channels that are always equal either can go: the layers
that read them get the same sum with the weight of the other doubled. So the score is not the size of a position, but
the part of it that a least-squares fit of the others leaves unexplained (see `elimination`), counted by how much that
changes the model's output: the squared derivative, for a classifier the Fisher information of its answer (see
`calibrate.fisher`). Pruning as reconstruction is from He, Zhang and Sun, "Channel pruning for accelerating very deep
neural networks" (2017), and Luo, Wu and Lin, "ThiNet" (2017).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur.arguments import a_number, check_fields
from secateur.calibrate import ParameterProduct, Runs, Watch, call
from secateur.calibrate.blame import blamed_on_batch, studied
from secateur.calibrate.data import dealt, is_dealt, own, with_first
from secateur.calibrate.fisher import fisher_sums, over_ranks
from secateur.calibrate.products import Part
from secateur.calibrate.structure import Structure, structure
from secateur.calibrate.sums import added
from secateur.distributed import pooled, ranks, totals
from secateur.errors import CalibrationError, SecateurWarning
from secateur.importance.criterion import JointCriterion
from secateur.importance.elimination import ErrorTerm, Independent, Regression, eliminate
from secateur.importance.weights import Context, Weights, zero
from secateur.tracing.graph import Axis

_DOUBLE = 2**10  # summed elements up to which the inverse is in double precision
_HELD = 2**31  # bytes of second moments at a time
_WHAT = "Reconstruction"
_ADDED_UP = 0.25  # errors at n places of an input are n to this power: layers behind make up for some of their sum
_UNKNOWN = 1e30  # the score where nothing can be told: such an axis is the last to be cut


@dataclass(frozen=True, eq=False)
class Reconstruction(JointCriterion):
    """The error that is left in the model's output when a position goes and the rest makes up for it.

    >>> import secateur as sec
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> net[0].weight.data[2] = net[0].weight.data[1]  # whatever the third can do, the second can
    >>> criterion = sec.Reconstruction([torch.randn(64, 4)])
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> sorted({0, 1, 2} - set(sec.plan(graph, sec.Ratio(0.4), importance=criterion).axes[0].keep))[0] > 0
    True

    Positions go one after the other, the one that costs least first; a score is what the error grows by. How much it
    matters what a layer loses is the squared derivative of the model's output (for the logits of a classifier: the
    Fisher information of its answer; no labels are needed). Scores are in the same unit everywhere, so a budget is
    spent where it costs least. Best together with `LeastSquares`, which carries out the fit.
    """

    batches: Any
    ridge: float = 1e-3

    comparable = True

    def __post_init__(self) -> None:
        check_fields(self, CalibrationError, ridge=a_number(above=0))

    def scores(self, weights: Weights) -> dict[Axis, Tensor]:
        """What the error grows by with each position, axis by axis."""
        with dealt(self.batches, _WHAT) as batches:
            return self._scores(weights, MomentStore(weights.model, batches))

    def _scores(self, weights: Weights, store: MomentStore) -> dict[Axis, Tensor]:
        """One axis after the other; where each rank has a part of the data, it also does a part of the axes."""
        found = {}
        for number, axis in enumerate(weights.axes):
            context = weights.context(axis)
            sites = [site for site, _ in context.sites()]
            following = (site.tensor for later in weights.axes[number:] for site in later.sites)
            held = store.of({site.tensor for site in sites}, following)
            if not store.mine(number):
                continue
            products = [(moments, site.dim) for site in sites for moments in held.get(site.tensor, ())]
            terms = [term for moments, dim in products for term in self._terms(moments, context, dim)]
            found[number] = eliminate(terms, axis.size) if terms else _unread(products, context)
        found = pooled(_WHAT, found) if store.dealt else found
        return {axis: found[number] for number, axis in enumerate(weights.axes)}

    def _terms(self, moments: InputMoments, context: Context, dim: int) -> Iterator[ErrorTerm]:
        """What a product that reads the axis loses, for each place of the axis in what it sums over."""
        index = moments.summed(dim)
        owners = [] if index is None else [owner[index] for owner in context.owners(moments.name, dim)]
        if owners and moments.narrow:
            inverse, weight = moments.inverse(self.ridge), moments.weighted()
            yield from (Regression(*group) for owner in owners for group in zip(inverse, weight, owner, strict=True))
        elif owners:
            yield from (Independent(moments.columns().cpu(), owner) for owner in owners)


def _unread(products: list[tuple[InputMoments, int]], context: Context) -> Tensor:
    """Scores where nothing but other data reads an axis: how much the output varies with what makes a position."""
    total = torch.zeros(context.axis.size, dtype=torch.float64)
    seen = False
    for moments, dim in products:
        index = moments.made(dim)
        for owner in context.owners(moments.name, dim) if index is not None else ():
            position = owner[index].flatten()
            total.index_add_(0, position[position >= 0], moments.effects().cpu().flatten()[position >= 0])
            seen = True
    return total if seen else torch.full_like(total, _UNKNOWN)


@dataclass(eq=False)
class InputMoments:
    """The second moments of the inputs of a product with a parameter, and how much each of its outputs matters."""

    name: str
    weight: Tensor  # (groups, outputs, summed)
    index: Mapping[int, Tensor]
    narrow: bool = True  # whether it has all second moments of its inputs, not only their squares
    shifts: bool = True  # whether a refit can change the mean of its outputs: by a bias, or by a norm behind it
    rows: int = 0
    xx: Tensor = field(default_factory=zero)  # (groups, summed, summed); too wide: (groups, summed)
    x: Tensor = field(default_factory=zero)  # (groups, summed)
    fisher: Tensor = field(default_factory=zero)  # (groups, outputs); zero where nothing tells

    def add(self, x: Tensor) -> None:
        """Take in inputs as (groups, rows, summed)."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        self.rows += x.shape[1]
        self.xx = added(self.xx, x.mT @ x if self.narrow else x.square().sum(1))
        self.x = added(self.x, x.sum(1))

    def told(self) -> tuple[Any, ...]:
        """What is known without data, to tell other ranks."""
        return self.weight, [[dim, index] for dim, index in self.index.items()], self.narrow, self.shifts

    @staticmethod
    def of(name: str, weight: Tensor, index: list[list[Any]], narrow: bool, shifts: bool) -> InputMoments:
        """Of a product that was told of."""
        return InputMoments(name, weight, {dim: at.cpu() for dim, at in index}, narrow, shifts)

    def summed(self, dim: int) -> Tensor | None:
        """(groups, summed): the index in a dimension of the parameter at each summed element, if that varies."""
        index = self.index.get(dim)
        if index is None or index.shape[1] != 1 or index.shape[2] == 1:
            return None
        return index[:, 0].expand(self.weight.shape[0], -1)

    def made(self, dim: int) -> Tensor | None:
        """(groups, outputs): the index in a dimension of the parameter at each output, if that varies."""
        index = self.index.get(dim)
        if index is None or index.shape[2] != 1:
            return None
        return index[:, :, 0].expand(self.weight.shape[:2])

    def spread(self) -> Tensor:
        """The covariance of the inputs; about zero, where no shift can make up for their mean."""
        if not self.shifts:
            return self.xx / self.rows
        mean = self.x / self.rows
        return self.xx / self.rows - (mean.unsqueeze(2) * mean.unsqueeze(1) if self.narrow else mean.square())

    def columns(self) -> Tensor:
        """(groups, summed): how much of the model's output goes with the variation of each input by itself."""
        spread = self.spread()
        spread = spread.diagonal(dim1=1, dim2=2) if self.narrow else spread
        return self.weighted().square().sum(1) * spread

    def effects(self) -> Tensor:
        """(groups, outputs): how much of the model's output goes with the variation of each output."""
        weight, spread = self.weighted(), self.spread()
        return ((weight @ spread if self.narrow else weight * spread.unsqueeze(1)) * weight).sum(2)

    def inverse(self, ridge: float) -> Tensor:
        """The inverse of how the inputs spread, held away from singular by `ridge`."""
        spread = self.spread()
        if spread.shape[-1] > _DOUBLE:
            spread = spread.float()
        diagonal = spread.diagonal(dim1=1, dim2=2)
        pull = (ridge * diagonal.mean(1, keepdim=True)).clamp_min(1e-12)
        while True:
            factor, failing = torch.linalg.cholesky_ex(spread + torch.diag_embed(pull.expand_as(diagonal)))
            if not failing.any():
                return torch.cholesky_inverse(factor)
            pull = pull * 10  # rounding made it singular

    def weighted(self) -> Tensor:
        """The weight, each output by how much it matters."""
        return self.weight.double() * self.fisher.to(self.weight.device).sqrt().unsqueeze(-1)


class MomentStore:
    """The products of a model by parameter, with the moments of their inputs over all batches.

    Of the moments only so many are held at a time as memory allows: those that are asked for, and those that will be
    next. What is not held any more is gone, and asked for again it takes another pass over the batches.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self._model, self._batches = model, batches
        self._held: dict[str, list[InputMoments]] = {}
        self.dealt = is_dealt(batches)

    def mine(self, number: int) -> bool:
        """Whether this rank is the one to do a piece of work of some number, and to tell the others."""
        return not self.dealt or number % ranks() == dist.get_rank()

    def of(self, names: set[str], following: Iterable[str] = ()) -> Mapping[str, list[InputMoments]]:
        """The products with parameters, of which `following` may be asked for later."""
        if not names <= self._held.keys():
            self._held = {}
            self._held = self._pass(self._chosen(names, following))
        return self._held

    def _chosen(self, names: set[str], following: Iterable[str]) -> set[str]:
        """As many parameters as fit, at least those that are asked for."""
        chosen, size = set(names), sum(self._sizes[name] for name in names)
        for name in following:
            if name not in chosen:
                size += self._sizes[name]
                if size > _HELD:
                    break
                chosen.add(name)
        return chosen

    @cached_property
    def _fisher(self) -> dict[Part, Tensor] | None:
        found, failed = {}, 0
        try:
            with studied(self._model, _WHAT):
                found = fisher_sums(self._model, self._batches)
        except Exception as error:  # any code of the user's may run here
            self._run(lambda *_: None, self._batches)  # if it is a batch that is at fault, that is said here
            failed = 1
            warnings.warn(
                f"Reconstruction: the model cannot be differentiated, so each layer counts the same, whatever its "
                f"part in the output ({type(error).__name__}: {error})",
                SecateurWarning,
                stacklevel=2,
            )
        if self.dealt:
            failed = int(totals("Fisher weights", [torch.tensor(failed)])[0])
        if failed:
            return None
        sums = over_ranks(found, self._batches)
        least = min((rows for _, rows in sums.values()), default=1)
        return {part: squares / rows * (rows / least) ** _ADDED_UP for part, (squares, rows) in sums.items()}

    @cached_property
    def _structure(self) -> Structure:
        first = self._batches[:1]
        with studied(self._model, _WHAT), blamed_on_batch(0, _WHAT), Runs(self._model, first) as runs:
            return structure(runs)

    @cached_property
    def _sizes(self) -> Counter[str]:
        """The bytes of the moments of each parameter's products."""
        found: dict[Part, int] = {}

        def on_product(product: ParameterProduct, _: int) -> None:
            groups, summed = product.weight.shape[::2]
            found[product.part] = groups * summed**2 * 8

        self._run(on_product, self._batches[:1])
        sizes: Counter[str] = Counter()
        for (name, *_), size in found.items():
            sizes[name] += size
        return sizes

    def _pass(self, names: set[str]) -> dict[str, list[InputMoments]]:
        """Run all batches and take in what products with some parameters read."""
        _ = self._fisher  # takes much memory, which the moments would be held beside
        known: dict[Part, InputMoments] = {}
        mine = set(own(self._batches))

        def on_product(product: ParameterProduct, number: int) -> None:
            if product.name not in names:
                return
            key = product.part
            if key not in known:
                shifts = product.bias is not None or product.name in self._structure.norms
                known[key] = InputMoments(product.name, product.weight.detach(), product.index, product.narrow, shifts)
            if number in mine:
                for rows in product.of.rows(product.of.sample(-(-product.enough // len(self._batches)), number)):
                    known[key].add(rows)

        self._run(on_product, self._batches)
        if self.dealt:
            known = self._over_ranks(known)
        found: dict[str, list[InputMoments]] = {name: [] for name in names}
        for which, moments in known.items():
            if not bool(moments.xx.isfinite().all()):
                raise CalibrationError(
                    f"Reconstruction: what {moments.name} is multiplied with is not finite; are there NaN weights or "
                    "data?"
                )
            moments.fisher = self._fisher_of(moments, which)
            found[moments.name].append(moments)
        return found

    def _over_ranks(self, known: Mapping[Part, InputMoments]) -> dict[Part, InputMoments]:
        """The moments of the batches of all ranks; products that a rank did not come to are told it."""
        device = next(self._model.parameters()).device
        told = pooled("Reconstruction: products", {key: moments.told() for key, moments in known.items()}, device)
        every = {key: known[key] if key in known else InputMoments.of(key[0], *what) for key, what in told.items()}
        sums = [
            each for one in every.values() for each in (torch.tensor(one.rows), one.xx.to(device), one.x.to(device))
        ]
        added_up = iter(totals("Reconstruction: moments", sums))
        for one in every.values():
            one.rows, one.xx, one.x = int(next(added_up)), next(added_up), next(added_up)
        return every

    def _fisher_of(self, moments: InputMoments, which: Part) -> Tensor:
        """How much each output matters: to the model's, or else to all outputs of the layer."""
        if self._fisher is None:
            even = replace(moments, fisher=moments.xx.new_ones(moments.weight.shape[:2]))
            return even.fisher / even.effects().sum().clamp_min(1e-30)
        own = self._fisher.get(which)
        return moments.fisher if own is None or own.shape != moments.weight.shape[:2] else own

    def _run(self, on_product: Callable[[ParameterProduct, int], None], batches: Sequence[Any]) -> None:
        """All products in runs of the model, with the number of the batch: those of this rank, and the first."""
        with studied(self._model, _WHAT):
            for number in with_first(batches):

                def seen(product: ParameterProduct, run: Any, number: int = number) -> Any:
                    on_product(product, number)
                    return run()

                with blamed_on_batch(number, _WHAT), Watch(self._model, seen):
                    call(self._model, batches[number])
