"""How large the data are that weights read and make: what is never large matters little, and so does its weight."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import ParameterProduct, Watch, call
from secateur.calibrate.blame import batch_name, blamed_on_batch, studied
from secateur.calibrate.data import each_own, no_batches
from secateur.calibrate.sums import added
from secateur.distributed import pooled, ranks, totals
from secateur.errors import CalibrationError, SecateurWarning
from secateur.importance.criterion import JointCriterion
from secateur.importance.weights import Context, Sums, Weights, zero
from secateur.importance.without_data import Magnitude
from secateur.tracing.graph import Axis

_CHUNK = 2**22  # elements that are squared at a time


@dataclass(frozen=True, eq=False)
class Activation(JointCriterion):
    """The root mean square of a position's values where weights read them, over all batches.

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> net[0].weight.data = torch.tensor([[1.0], [-9.0], [2.0]])
    >>> batches = [torch.ones(4, 1), torch.ones(2, 1)]
    >>> sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.4), importance=Activation(batches)).axes[0].keep
    (0, 2)

    `batches` is an iterable of examples as in `trace`, or a function that makes one. A value counts as often as it is
    read: by each layer that reads it, by a convolution at each place of its kernel. An axis that no weight reads (that
    of queries and keys) is looked at where weights make it. The model runs in eval mode and is left as it was.
    """

    batches: Any

    def scores(self, weights: Weights) -> dict[Axis, Tensor]:
        """The root of Σ x² / n over the values of a position."""
        seen = mean_squares(weights, self.batches, "Activation")
        found = {axis: _of_axis(weights.context(axis), seen) for axis in weights.axes}
        told = {axis: own for axis, own in found.items() if own is not None}
        return filled_in(told, weights, Magnitude(), "Activation")


def _of_axis(context: Context, seen: ByParameter) -> Tensor | None:
    """The root mean square where a position is read or, where nothing reads it, made; None if that is nowhere."""
    for read in (True, False):
        squares, values = _gathered(context, seen, read=read)
        if values.all():
            return (squares / values).sqrt()
    return None


def _gathered(context: Context, seen: ByParameter, *, read: bool) -> tuple[Tensor, Tensor]:
    """For each position, the sum of the mean squares of its values where it is read (or made), and their number."""
    squares, values = torch.zeros(2, context.axis.size, dtype=torch.float64)
    for site, parameter in context.sites():
        for one in seen.get(id(parameter), ()):
            at = one.index.get(site.dim)
            means, other = (one.inputs, 1) if read else (one.outputs, 2)
            for owner in context.owners(site.tensor, site.dim) if at is not None else ():
                own = owner[at]
                if (own == own.narrow(other, 0, 1)).all():  # else the owner of an input depends on the output
                    own = own.select(other, 0).expand(means.shape)
                    mine = own >= 0
                    squares.index_add_(0, own[mine], means[mine])
                    values.index_add_(0, own[mine], torch.ones_like(means[mine]))
    return squares, values


@dataclass(frozen=True, eq=False)
class Wanda(JointCriterion):
    """Σ |w|·‖x‖ over all weights that go with a position, x being what each is multiplied with (Sun et al., 2023).

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> net[0].weight.data = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.5, 0.0]])
    >>> net[2].weight.data = torch.ones(1, 3)
    >>> batches = [torch.tensor([[4.0, 1.0]])]
    >>> sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.4), importance=Wanda(batches)).axes[0].keep
    (0, 2)

    ‖x‖ is the root mean square over all batches, so that their number does not matter. The sum is over the weights of
    products (linear layers, convolutions, recurrent layers) that make or read a position; biases and norms have no
    part in it. `batches` are those of `Activation`.
    """

    batches: Any = None

    def scores(self, weights: Weights) -> dict[Axis, Tensor]:
        """Σ |w|·‖x‖ over the weights of a position."""
        seen = mean_squares(weights, self.batches, "Wanda")

        def sums(_: str, parameter: Tensor, dims: Sequence[int]) -> Sums:
            parts = seen.get(id(parameter))
            return {} if parts is None else {d: _added(parts, d, parameter.shape[d]) for d in dims}

        multiplied = {name for name, parameter in weights.parameters.items() if id(parameter) in seen}
        known = [axis for axis in weights.axes if any(site.tensor in multiplied for site in axis.sites)]
        return filled_in(weights.of(known).gather(sums), weights, Magnitude(1), "Wanda")


def _added(parts: list[MeanSquares], dim: int, size: int) -> Tensor:
    return sum((_carried(one, dim, size) for one in parts), torch.zeros(size, dtype=torch.float64))


def _carried(one: MeanSquares, dim: int, size: int) -> Tensor:
    """Σ |w|·‖x‖ at each index of a dimension of the parameter."""
    precise = torch.promote_types(one.weight.dtype, torch.float32)
    carried = one.weight.to("cpu", precise).abs() * one.inputs.sqrt().to(precise).unsqueeze(1)
    at = one.index[dim]
    along = [i for i in range(3) if at.shape[i] == 1]
    sums = carried.sum(along, keepdim=True, dtype=torch.float64) if along else carried.to(torch.float64)
    return torch.zeros(size, dtype=torch.float64).index_add_(0, at.flatten(), sums.flatten())


@dataclass
class MeanSquares:
    """The mean squares of what a product `out[n, g, o] = Σ_k inputs[n, g, k] · weight[g, o, k]` read and made.

    `index` says for each dimension of the parameter at which of its indices an element of the weight is.
    """

    weight: Tensor
    index: Mapping[int, Tensor]
    squares_in: Tensor = field(default_factory=zero)  # (groups, summed)
    squares_out: Tensor = field(default_factory=zero)  # (groups, outputs)
    rows: int = 0

    def add(self, product: ParameterProduct, out: Tensor) -> None:
        """Count what one product read and made. Sums over the batch come first, as rows are many times larger."""
        folded = replace(product.of, data=_squares(product.of.data))
        every = folded.sample(sys.maxsize)
        for part in folded.rows(every):
            self.squares_in = added(self.squares_in, part.sum(1))
            self.rows += part.shape[1] * len(product.of.data)
        for part in folded.outputs(_squares(out), every):
            self.squares_out = added(self.squares_out, part.sum(1))

    @property
    def inputs(self) -> Tensor:
        """(groups, summed): the mean square of each input."""
        return self.squares_in.cpu() / self.rows

    @property
    def outputs(self) -> Tensor:
        """(groups, outputs): the mean square of each output."""
        return self.squares_out.cpu() / self.rows


ByParameter = Mapping[int, list[MeanSquares]]  # by its id; one for each of its parts that is used by itself


def _squares(data: Tensor) -> Tensor:
    """Σ x² over the first dimension, which stays, with one entry; some at a time."""
    total = torch.zeros(1, *data.shape[1:], dtype=torch.float64, device=data.device)
    for part in data.split(max(1, _CHUNK * len(data) // max(1, data.numel()))):
        total += part.to(torch.promote_types(part.dtype, torch.float32)).square().sum(0, dtype=torch.float64)
    return total


def mean_squares(weights: Weights, batches: Any, what: str) -> ByParameter:
    """Of what every product with a parameter read and made over all batches; once for all criteria with the same."""
    if id(batches) not in weights.observed:
        weights.observed[id(batches)] = batches, _observed(weights.model, batches, what)
    return weights.observed[id(batches)][1]


def _observed(model: nn.Module, batches: Any, what: str) -> ByParameter:
    found: dict[tuple[Any, ...], MeanSquares] = {}

    def note(product: ParameterProduct, run: Any) -> Any:
        out = run()
        view = product.of.weight
        kind, begin = type(product.of).__name__, int(view.storage_offset())
        which = (product.name, kind, begin, tuple(view.shape), tuple(view.stride()), product.of.groups)
        if which not in found:
            found[which] = MeanSquares(product.weight.detach(), product.index)
        found[which].add(product, out)
        return out

    watch = Watch(model, note)
    with studied(model, what):
        for number, batch in enumerate(each_own(batches, what)):
            with blamed_on_batch(number, what), watch:
                call(model, batch)
            _check(found.values(), f"{what}: {batch_name(number)}")
    every = over_ranks(found, what)
    by_parameter: dict[int, list[MeanSquares]] = {}
    for which, one in every.items():
        by_parameter.setdefault(id(watch.parameters.tensors[which[0]]), []).append(one)
    return by_parameter


def over_ranks(found: Mapping[tuple[Any, ...], MeanSquares], what: str) -> Mapping[tuple[Any, ...], MeanSquares]:
    """With what other ranks have seen; there is something, somewhere."""
    if ranks() == 1:
        return found
    known = {key: (one.weight, [[dim, at] for dim, at in one.index.items()]) for key, one in found.items()}
    every = {
        key: found[key] if key in found else MeanSquares(weight, dict(index))
        for key, (weight, index) in pooled(what, known).items()
    }
    sums = [each for one in every.values() for each in (one.squares_in, one.squares_out, torch.tensor(one.rows))]
    added_up = iter(totals(what, sums))
    for one in every.values():
        one.squares_in, one.squares_out, one.rows = next(added_up), next(added_up), int(next(added_up))
    if not every:
        raise no_batches(what)
    return every


def _check(found: Iterable[MeanSquares], where: str) -> None:
    sums = [part.sum() for one in found for part in (one.squares_in, one.squares_out)]
    if sums and not bool(torch.stack([part.to(sums[0].device) for part in sums]).isfinite().all()):
        raise CalibrationError(f"{where}: what the model computes is not finite: is the batch, are the weights?")


def filled_in(
    found: Mapping[Axis, Tensor], weights: Weights, criterion: JointCriterion, what: str
) -> dict[Axis, Tensor]:
    """Scores of all axes, with a warning by another criterion where no product with a parameter reads or makes one."""
    missing = [axis for axis in weights.axes if axis not in found]
    for axis in missing:
        if any(site.tensor in weights.parameters for site in axis.sites):
            warnings.warn(
                f"{what}: {axis.name} is scored by {criterion!r}: no product with a parameter reads or makes it",
                SecateurWarning,
                stacklevel=2,
            )
    both = {**found, **criterion.scores(weights.of(missing))}
    return {axis: both[axis] for axis in weights.axes}
