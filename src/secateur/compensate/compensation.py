"""What all compensations share: both models side by side on the data, every change undone if it does not help."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from secateur.calibrate import Live, Parameters, calibrating, call
from secateur.compensate.outcome import Outcome
from secateur.compensate.pairs import Both, Pair, pairs
from secateur.compensate.refit import Refit
from secateur.compensate.repeated import repeated
from secateur.compensate.structure import Structure, structure
from secateur.errors import CalibrationError, SecateurError, SecateurWarning
from secateur.importance.batches import because, each
from secateur.plan.plan import Plan
from secateur.progress import progress
from secateur.surgery import named_tensors
from secateur.surgery.bias import ensure_bias
from secateur.surgery.cut import select
from secateur.trace.capture import tensors_in
from secateur.trace.held import Snapshot

_NOTHING = 1e-12  # an error of the output that is rounding


class Compensation:
    """Changes what is left of a model so that its layers put out on the given batches what they did before the cut."""

    weights = True  # whether weights are solved for
    shifts = True  # whether biases are
    guarded = True  # whether all is taken back if the output is no nearer

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        ridge: float = 1e-3,
        bias: bool = True,
        statistics: bool = True,
        memory: float = 4e9,
    ) -> None:
        if isinstance(ridge, bool) or not isinstance(ridge, int | float) or not 0 < ridge < float("inf"):
            raise CalibrationError(f"ridge is a positive number, not {ridge!r}")
        if isinstance(memory, bool) or not isinstance(memory, int | float) or not memory > 0:
            raise CalibrationError(f"memory is a number of bytes, not {memory!r}")
        self.batches = batches
        self.memory = memory
        self.ridge = float(ridge)
        self.bias = bias
        self.statistics = statistics
        self.outcome: Outcome | None = None

    def __call__(self, whole: nn.Module, cut: nn.Module, plan: Plan) -> Outcome:
        """Compensate a cut model, in place; `whole` is the model as it was. All or nothing."""
        what = type(self).__name__
        batches = list(each(self.batches, what))
        with _undone_on_failure(whole, cut, plan) as undo:
            try:
                self.outcome = self._compensate(whole, cut, plan, batches, undo)
            except (SecateurError, KeyboardInterrupt):
                raise
            except Exception as error:  # any code of the user's may run here
                raise CalibrationError(f"{what}: the model failed on the batches: {because(error)}") from error
        if self.outcome.taken_back:
            warnings.warn(f"{what}: {self.outcome.notes[-1]}", SecateurWarning, stacklevel=4)
        return self.outcome

    def _compensate(self, whole: nn.Module, cut: nn.Module, plan: Plan, batches: list[Any], undo: Any) -> Outcome:
        with calibrating(whole, cut):
            found = structure(whole, batches[0]), structure(cut, batches[0])
            batches, fewer = _fitting(whole, cut, batches, self.memory)
            plain = _error(whole, cut, batches)
        if self.guarded and plain < _NOTHING:
            return Outcome((), plain, plain, (*fewer, "the outputs are those of the uncut model as it is"))
        stops, again = _stops(found, cut) if self.weights or self.shifts else (frozenset(), Counter())
        for names in (again, Counter[str]()) if again else (again,):  # what is used again feeds on its own errors
            refit, error = self._refitted(whole, cut, plan, batches, found, stops, names)
            notes = (*fewer, *refit.notes(plan))
            if not self.guarded or error <= plain * (1 + 1e-6) + 1e-9:
                return Outcome(refit.layers, plain, error, notes)
            undo()
        note = f"the output would be further off than without ({plain:.4g} → {error:.4g}), so all was taken back"
        return Outcome(refit.layers, plain, plain, (*notes, note), taken_back=True)

    def _refitted(
        self,
        whole: nn.Module,
        cut: nn.Module,
        plan: Plan,
        batches: list[Any],
        found: tuple[Structure, Structure],
        stops: frozenset[str],
        again: Counter[str],
    ) -> tuple[Refit, float]:
        """Refit what a run uses more than once, then all else in the order of the run; how far the output is off."""
        if self.bias and stops:
            _add_biases(cut, plan, found[1], stops)
        refit = Refit(self, found, plan, dict(named_tensors(cut)), stops)
        with calibrating(whole, cut):
            for slot, folds in repeated(whole, refit.tensors, refit.kept, batches, again):
                refit.solve(folds, slot)
            return refit, self._run(whole, cut, found, batches, refit)

    def _run(
        self, whole: nn.Module, cut: nn.Module, found: tuple[Structure, Structure], batches: list[Any], refit: Refit
    ) -> float:
        """All batches through both models in step; each layer is refitted when all batches have reached it."""
        with pairs(whole, cut, found, batches, refit.stops) as made:
            for steps in progress(_together(made), type(self).__name__):
                if isinstance(steps[0], Both):
                    refit.product(steps)
                else:
                    refit.norm(steps)
            total = [_difference(*pair.results()) for pair in made]
        return _relative(total)


def _fitting(whole: nn.Module, cut: nn.Module, batches: list[Any], memory: float) -> tuple[list[Any], list[str]]:
    """As many batches as may run side by side, spread evenly over all of them, and a note if these are not all."""
    with Live() as live:
        call(whole, batches[0])
    with Live() as less:
        call(cut, batches[0])
    n = max(1, int(memory / max(live.peak + less.peak, 1)))
    if n >= len(batches):
        return batches, []
    chosen = [batches[i * len(batches) // n] for i in range(n)]
    size = (live.peak + less.peak) / 1e9
    return chosen, [f"{n} of {len(batches)} batches were used: each takes {size:.2g} GB, and `memory` is {memory:.2g}"]


def _together(made: list[Pair]) -> Iterator[list[Any]]:
    """Where all pairs stand, from stop to stop, to the end."""
    while (steps := [pair.advance() for pair in made])[0] is not None:
        yield steps


def _stops(found: tuple[Structure, Structure], cut: nn.Module) -> tuple[frozenset[str], Counter[str]]:
    """The parameters whose products are refitted: those that both models use once in a run, and those used again."""
    tied = Parameters.of(cut).tied
    once = frozenset(name for name, n in found[1].products.items() if n == 1 == found[0].products[name]) - tied
    again = Counter({name: n for name, n in found[0].products.items() if n > 1 and name not in tied})
    return once, again


def _add_biases(cut: nn.Module, plan: Plan, found: Structure, stops: frozenset[str]) -> None:
    """Give a bias to each layer that reads removed positions, has none, and no norm behind it to take a shift."""
    for name, module in cut.named_modules():
        if not isinstance(module, nn.Linear | _ConvNd) or module._parameters.get("bias", 0) is not None:
            continue
        weight = f"{name}.weight".lstrip(".")
        read = 0 if isinstance(module, _ConvTransposeNd) else 1
        if weight in stops and weight not in found.norms and read in plan.kept.get(weight, {}):
            ensure_bias(cut, name)


@contextmanager
def _undone_on_failure(whole: nn.Module, cut: nn.Module, plan: Plan) -> Iterator[Any]:
    """Every value of the cut model as it comes from the full-size one, and no tensors added, if anything goes wrong."""
    snapshot = Snapshot(cut)
    origin = dict(named_tensors(whole))

    def undo() -> None:
        snapshot.restore()
        with torch.no_grad():
            for name, tensor in named_tensors(cut):
                tensor.copy_(select(origin[name], plan.kept.get(name, {})))

    try:
        yield undo
    except BaseException:
        undo()
        raise


def _error(whole: nn.Module, cut: nn.Module, batches: list[Any]) -> float:
    """How far apart the outputs of both models are: squared error over square."""
    return _relative([_difference(call(whole, batch), call(cut, batch)) for batch in batches])


def _difference(whole: Any, cut: Any) -> tuple[float, float]:
    """The squared difference of two outputs, and the square of the first."""
    off = size = 0.0
    for a, b in zip(tensors_in(whole), tensors_in(cut), strict=False):
        if a.is_floating_point() and a.shape == b.shape:
            off += _square(a.float() - b.float())
            size += _square(a.float())
    return off, size


def _square(tensor: Tensor) -> float:
    finite = torch.nan_to_num(tensor, nan=float("inf"), posinf=float("inf"), neginf=float("inf"))
    return float(torch.linalg.vector_norm(finite, dtype=torch.float64).square())


def _relative(parts: list[tuple[float, float]]) -> float:
    off, size = (sum(part[i] for part in parts) for i in (0, 1))
    return off / size if size > 0 else off


class LeastSquares(Compensation):
    """Let the kept positions take over what the removed ones did, as far as they can express it.

    >>> import secateur as sec
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> batches = [torch.randn(64, 4) for _ in range(4)]
    >>> plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    >>> compensate = sec.LeastSquares(batches)
    >>> _ = sec.apply(net, plan, compensate=compensate)
    >>> compensate.outcome.after < compensate.outcome.before
    True

    Layer by layer, in the order in which they run, every weight that is multiplied with data is solved for anew: its
    inputs are those of the cut model so far, its outputs should be those of the uncut model. Where the result is added
    to a residual stream, it also makes up for what that stream is off. `ridge`, a share of the inputs' mean square,
    holds weights near what they were; up to a thousand times as much, if a fit to half of the batches then does better
    on the other half. A layer without a bias gets one where positions that it reads are gone and no
    batch norm follows (`bias=False`: none does). Batch norms that do not follow a refitted layer get the mean and
    variance of the batches (`statistics=False`: they stay).

    All batches run side by side, so what layers put out for all of them is in memory at once (`memory`: at most so many
    bytes; fewer of the batches are used if that must be), and the second moments of one layer's inputs at a time.
    What a run uses more than once (a recurrence, experts) is fitted to the inputs that the uncut model gives it.
    `outcome` says afterwards what was reached, layer by layer. If the model's outputs are no nearer to the uncut
    model's than without it, everything is taken back.
    """


class Constants(Compensation):
    """Fold the mean of what is removed into the biases of what reads it.

    >>> import secateur as sec
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2))
    >>> batches = [torch.randn(64, 4)]
    >>> plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    >>> _ = sec.apply(net, plan, compensate=sec.Constants(batches))
    >>> net[2].weight.shape
    torch.Size([2, 4])

    As `LeastSquares`, but weights stay as they are.
    """

    weights = False


class Statistics(Compensation):
    """Give batch norms the mean and variance that the batches have in the cut model.

    >>> import secateur as sec
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
    >>> batches = [torch.randn(8, 3, 8, 8)]
    >>> for _ in range(50):
    ...     _ = net(batches[0])
    >>> plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    >>> _ = sec.apply(net, plan, compensate=sec.Statistics(batches))
    """

    weights = shifts = guarded = False
