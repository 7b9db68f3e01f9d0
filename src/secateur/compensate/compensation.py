"""Refit what is left of a model after a cut to what the full-size model does, from unlabelled inputs.

Both models run on the same batches, layer by layer: each batch in its turn goes on to the next layer and is left there
(`pairs`, `calibrate.stages`). When all batches have reached a layer, its weights are solved for anew by ridge
regression, from the inputs that it has in the cut model to the outputs that it had in the full-size one (`refit`,
`moments`); then the runs go on through the new weights, so that later layers make up for what earlier ones could not.
How strong the ridge is, whether a layer is changed at all and what was reached, batches tell that were held back.
The idea of fitting layer after layer to the uncut outputs is that of He, Zhang and Sun, "Channel pruning for
accelerating very deep neural networks" (2017).
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import Parameters, Runs, calibrating
from secateur.calibrate.blame import batch_name, because_of_batch
from secateur.calibrate.data import Some, dealt, is_dealt, own, taken
from secateur.calibrate.structure import Structure, structure
from secateur.compat import Convolution, TransposedConvolution
from secateur.compensate.joint import fit_blocks
from secateur.compensate.moments import held_back
from secateur.compensate.pairs import Pairs
from secateur.compensate.recipes import Compensation, Outcome
from secateur.compensate.refit import Refit, repeated
from secateur.distributed import totals
from secateur.errors import CalibrationError, SecateurError, SecateurWarning
from secateur.planning.plans import Plan
from secateur.progress import progress
from secateur.state.held import named_tensors
from secateur.state.transaction import transaction
from secateur.surgery.bias import ensure_bias
from secateur.surgery.cut import select
from secateur.tracing.examples import tensors_in

_JUDGES = 8  # batches on which whole models are compared
_NOTHING = 1e-12  # an error of the output that is rounding


def carry_out(recipe: Compensation, whole: nn.Module, cut: nn.Module, plan: Plan) -> Outcome:
    """Compensate a cut model, in place; `whole` is the model as it was. All or nothing."""
    what = type(recipe).__name__
    origin = dict(named_tensors(whole))
    read = taken if recipe.joint else dealt
    with read(recipe.batches, what) as batches, transaction(cut) as made:
        for name, tensor in named_tensors(cut):  # every value can be had again from the full-size model
            made.keep(tensor, again=partial(select, origin[name], plan.kept.get(name, {})))
        try:
            outcome = _carried_out(recipe, whole, cut, plan, batches, made.roll_back)
            if recipe.joint and not outcome.taken_back and outcome.after >= _NOTHING:
                outcome = _fitted_together(recipe, whole, cut, plan, batches, outcome)
        except SecateurError:
            raise
        except Exception as error:  # any code of the user's may run here
            raise CalibrationError(f"{what}: the model failed on the batches: {because_of_batch(error)}") from error
    if outcome.taken_back:
        warnings.warn(f"{what}: {outcome.notes[-1]}", SecateurWarning, stacklevel=3)
    return outcome


def _carried_out(
    recipe: Compensation, whole: nn.Module, cut: nn.Module, plan: Plan, batches: Sequence[Any], undo: Any
) -> Outcome:
    judges = _judges(len(batches))
    with calibrating(whole, cut), _runs(recipe, whole, cut, batches) as (one, other):
        found = structure(one), structure(other)
        parts = [_difference(one.run(n), other.run(n), recipe, n) for n in _mine(judges, batches)]
        plain = _relative(parts, batches)
    held = len(judges) if held_back(len(batches)) else 0
    if recipe.guarded and plain < _NOTHING:
        return Outcome((), plain, plain, ("the outputs are those of the uncut model as it is",), held=held)
    stops, again = _stops(found, cut) if recipe.weights or recipe.shifts else (frozenset(), Counter())
    for names in (again, Counter[str]()) if again else (again,):  # what is used again feeds on its own errors
        if recipe.bias and stops:
            _add_biases(cut, plan, found[1], stops)
        refit, error = _refitted(recipe, whole, cut, plan, batches, stops, names)
        notes = tuple(refit.notes(plan))
        if not recipe.guarded or error <= plain * (1 + 1e-6) + 1e-9:
            return Outcome(refit.layers, plain, error, notes, held=held)
        undo()
    note = f"the output would be further off than without ({plain:.4g} → {error:.4g}), so all was taken back"
    return Outcome(refit.layers, plain, plain, (*notes, note), taken_back=True, held=held)


def _fitted_together(
    recipe: Compensation, whole: nn.Module, cut: nn.Module, plan: Plan, batches: Sequence[Any], before: Outcome
) -> Outcome:
    """Fit blocks as a whole and, to what these put out then, the layers beside them; if the output comes nearer."""
    if not held_back(len(batches)):
        return replace(before, notes=(*before.notes, "joint: it takes four batches, one of them to judge by"))
    values = [(tensor, tensor.detach().clone()) for _, tensor in named_tensors(cut)]
    blocks = fit_blocks(whole, cut, plan, batches, recipe.joint)
    with calibrating(whole, cut), _runs(recipe, whole, cut, batches) as (one, other):
        stops, _ = _stops((structure(one), structure(other)), cut)
    done = tuple(f"{block.name}." for block in blocks)
    beside = frozenset(name for name in stops if not name.startswith(done))
    _, after = _refitted(recipe, whole, cut, plan, batches, beside, Counter(), done)
    if blocks and after <= before.after:
        return replace(before, layers=(*before.layers, *blocks), after=after)
    with torch.no_grad():
        for tensor, value in values:
            tensor.copy_(value)
    note = f"joint: blocks fitted as a whole do no better ({before.after:.4g} → {after:.4g}), so they are as before"
    return replace(before, notes=(*before.notes, note))


def _refitted(
    recipe: Compensation,
    whole: nn.Module,
    cut: nn.Module,
    plan: Plan,
    batches: Sequence[Any],
    stops: frozenset[str],
    again: Counter[str],
    done: tuple[str, ...] = (),
) -> tuple[Refit, float]:
    """Refit what a run uses more than once, then all else in the order of the run; how far the output is off.

    Batch norms whose names begin with something in `done` stay as they are.
    """
    held = held_back(len(batches))
    with calibrating(whole, cut), _runs(recipe, whole, cut, batches) as (one, other):
        found = structure(one), structure(other)
        refit = Refit(recipe, found, plan, dict(named_tensors(cut)), stops, held)
        refit.solve(repeated(whole, refit.tensors, refit.kept, batches, held, again), is_dealt(batches))
        made = Pairs(one, other, found)
        once = [name for name in found[1].variances if found[1].means[name] == 1 and not name.startswith(done)]
        norms = once if recipe.statistics else []
        for names in progress(made.stages(stops, norms), type(recipe).__name__):
            refit.stage(names, made)
        judges = _mine(_judges(len(batches)), batches)
        return refit, _relative([_difference(*made.results(n), recipe, n) for n in judges], batches)


@contextmanager
def _runs(
    recipe: Compensation, whole: nn.Module, cut: nn.Module, batches: Sequence[Any]
) -> Iterator[tuple[Runs, Runs]]:
    """Those of both models on the same batches."""
    what = type(recipe).__name__
    with Runs(whole, batches, what=what) as one, Runs(cut, batches, what=what) as other:
        yield one, other


def _judges(batches: int) -> Sequence[int]:
    """Some of the batches that were held back, if any were: they tell how far the output is off, in whole runs."""
    return Some(sorted(held_back(batches)) or range(batches), _JUDGES)


def _stops(found: tuple[Structure, Structure], cut: nn.Module) -> tuple[frozenset[str], Counter[str]]:
    """The parameters whose products are refitted: those that both models use once in a run, and those used again."""
    tied = Parameters.of(cut).tied | found[0].two_ways()
    once = frozenset(name for name, n in found[1].products.items() if n == 1 == found[0].products[name]) - tied
    again = Counter({name: n for name, n in found[0].products.items() if n > 1 and name not in tied})
    return once, again


def _add_biases(cut: nn.Module, plan: Plan, found: Structure, stops: frozenset[str]) -> None:
    """Give a bias to each layer that reads removed positions, has none, and no norm behind it to take a shift."""
    for name, module in cut.named_modules():
        if not isinstance(module, nn.Linear | Convolution) or module._parameters.get("bias", 0) is not None:
            continue
        weight = f"{name}.weight".lstrip(".")
        read = 0 if isinstance(module, TransposedConvolution) else 1
        if weight in stops and weight not in found.norms and read in plan.kept.get(weight, {}):
            ensure_bias(cut, name)


def _difference(whole: Any, cut: Any, recipe: Compensation, number: int) -> tuple[float, float]:
    """The squared difference of two outputs, and the square of the first, where that is finite."""
    off = size = 0.0
    pairs = zip(tensors_in(whole), tensors_in(cut), strict=False)
    found = [(a.float(), b.float()) for a, b in pairs if a.is_floating_point() and a.shape == b.shape]
    if found and not any(bool(a.isfinite().any()) for a, _ in found if a.numel()):
        where = f"{type(recipe).__name__}: {batch_name(number)}"
        raise CalibrationError(f"{where}: no number that the uncut model puts out is finite; are the weights?")
    for a, b in found:
        told = a.isfinite()  # not where something is masked
        off += _square(torch.where(told, a - b, 0))
        size += _square(torch.where(told, a, 0))
    return off, size


def _square(tensor: Tensor) -> float:
    finite = torch.nan_to_num(tensor, nan=float("inf"), posinf=float("inf"), neginf=float("inf"))
    return float(torch.linalg.vector_norm(finite, dtype=torch.float64).square())


def _mine(numbers: Iterable[int], batches: Sequence[Any]) -> list[int]:
    """Those of some batches that this rank runs."""
    return [number for number in numbers if number in set(own(batches))]


def _relative(parts: list[tuple[float, float]], batches: Sequence[Any]) -> float:
    """How far apart the outputs of both models are: squared error over square, with what other ranks found."""
    sums = torch.tensor([[0.0, 0.0], *parts], dtype=torch.float64).sum(0)
    off, size = (totals("compensation: outputs", [sums])[0] if is_dealt(batches) else sums).tolist()
    return off / size if size > 0 else off
