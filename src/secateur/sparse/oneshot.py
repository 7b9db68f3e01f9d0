"""Zeros in a model in one call: layer by layer, from a little data, without training."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import calibrating, call
from secateur.calibrate.data import taken
from secateur.compat import BatchNorm
from secateur.errors import CalibrationError, PlanError, SecateurError
from secateur.importance import Magnitude, Wanda
from secateur.importance.batches import because, check_values
from secateur.prune import custom_from_mask, remove
from secateur.prune.sites import find_hook
from secateur.sparse.admm import ADMM
from secateur.sparse.layers import Survey, chosen
from secateur.sparse.patterns import NM, Pattern
from secateur.sparse.problem import Method
from secateur.sparse.report import Agreement, Differences, Sparsified, described
from secateur.sparse.scores import magnitude, wanda
from secateur.sparse.solve import Solver
from secateur.sparse.spread import Spread, checked
from secateur.state.transaction import transaction
from secateur.state.twin import copied
from secateur.tracing import unwrap
from secateur.tracing.examples import tensors_in

_CRITERIA: dict[type, Method] = {Magnitude: magnitude, Wanda: wanda}


def sparsify(
    model: nn.Module,
    batches: Any,
    pattern: Pattern,
    *,
    method: Any = None,
    protect: Sequence[str] = (),
    include: Sequence[str] = (),
    spread: Spread | None = None,
    held_back: Any = None,
    streams: bool = False,
    statistics: bool = True,
    masks: bool = False,
) -> Sparsified:
    """Set weights of a model to zero by a pattern, and the others so that its outputs stay what they were; in place.

    >>> import secateur as sec
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> report = sec.sparsify(net, [torch.randn(256, 8)], sec.NM(2, 4))
    >>> int((net[2].weight == 0).sum()), list(report.left_alone)
    (512, ['4.weight'])

    `batches` are a few inputs as the model will see them, each what the model is called with. Layers are solved in the
    order in which they run, each with the inputs that it has behind those with zeros. `method` is `ADMM()` (the
    default), `SparseGPT()`, `RIA()`, `Wanda()`, `Magnitude()`, or any function of a problem and a pattern.

    Every weight that data are multiplied with gets zeros, but for the head (what nothing but the output follows),
    embeddings and routers: `include` names such that shall, `protect` others that shall not, by name or glob. What is
    zero already stays zero and counts. Every weight has the same fraction of zeros, or they are spread by `Prices()` or
    `ERK()`. With `masks=True` the zeros come as masks of `secateur.prune`, which keep them through training; where a
    weight had such a mask, it has one afterwards in any case.

    Batch norms take their statistics anew (`statistics`). With `streams`, a layer whose result is added to a residual
    stream also makes up for what that lacks. `held_back` are batches that the report compares the outputs on. All or
    nothing: whatever goes wrong, the model is as it was.
    """
    begun = time.perf_counter()
    solve, inner = _method(method), unwrap(model)
    _check_pattern(pattern)
    check_values(inner, inner.parameters(), "sparsify")
    with taken(batches, "sparsify") as data, _judges(held_back) as kept_back, transaction(inner) as undo, _blamed():
        undo.keep(*inner.buffers())
        masked = _unmasked(inner)
        survey = _surveyed(inner, data[0])
        names = chosen(survey, pattern, _listed(protect), _listed(include))
        dense = _dense_copy(inner, names)
        for name in set(names) - set(masked):  # those with a mask have other memory, and get theirs back
            undo.keep(inner.get_parameter(name), again=partial(_value, dense.get_parameter(name)))
        patterns = _patterns(pattern, spread, dense, names, data)
        solver = Solver(dense, inner, solve, patterns, survey.streams if streams else {})
        _solve_all(solver, survey, data)
        if statistics:
            _take_statistics(inner, data)
        found = solver.layers(), solver.left_alone(survey), _agreement(dense, inner, kept_back)
        _mask(inner, [*masked, *(names if masks else ())])
    layers, alone, agreement = found
    return Sparsified(*described(pattern, method or solve), layers, alone, agreement, time.perf_counter() - begun)


def _judges(held_back: Any) -> AbstractContextManager[Sequence[Any]]:
    """The batches that were held back, none if none were given."""
    return nullcontext(()) if held_back is None else taken(held_back, "sparsify: held_back")


def _patterns(
    pattern: Pattern, spread: Spread | None, model: nn.Module, names: Sequence[str], batches: Sequence[Any]
) -> dict[str, Pattern]:
    """The pattern of each parameter."""
    if checked(spread) is None:
        return dict.fromkeys(names, pattern)
    assert spread is not None
    if isinstance(pattern, NM):
        raise PlanError(f"{pattern} is the same for every weight, so there is nothing to spread; leave spread= out")
    with calibrating(model):
        found = spread.sparsities(model, names, pattern.sparsity, batches)
    return {name: pattern.at(found[name]) for name in names}


def _surveyed(model: nn.Module, example: Any) -> Survey:
    with calibrating(model):
        return Survey.of(model, example)


def _solve_all(solver: Solver, survey: Survey, batches: Sequence[Any]) -> None:
    """First what a run uses more than once or in parts, then the others in the order of the run."""
    once = {name for name in solver.patterns if survey.products[name] == 1 and name in survey.whole}
    with calibrating(solver.dense, solver.sparse):
        solver.repeated(set(solver.patterns) - once, batches)
        solver.once(once, batches)


def _method(given: Any) -> Method:
    if given is None:
        return ADMM()
    known = _CRITERIA.get(type(given))
    if known is None and not callable(given):
        raise PlanError(f"method is ADMM(), SparseGPT(), RIA(), Wanda(), Magnitude() or a function, not {given!r:.80}")
    return given if known is None else known


def _check_pattern(given: Any) -> None:
    if not isinstance(given, Pattern):
        raise PlanError(f"sparsify takes a pattern, such as Unstructured(0.5) or NM(2, 4), not {given!r:.80}")


def _listed(names: Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


@contextmanager
def _blamed() -> Iterator[None]:
    try:
        yield
    except SecateurError:
        raise
    except Exception as error:  # any code of the user's may run here
        raise CalibrationError(f"sparsify: the model failed on the batches: {because(error)}") from error


def _dense_copy(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """The model as it is, to compare with; it shares the memory of all parameters that get no zeros."""
    written = {id(model.get_parameter(name)) for name in names}
    shared = {id(parameter) for parameter in model.parameters()} - written  # not the buffers: norms write into theirs
    try:
        return copied(model, lambda tensor: id(tensor) in shared)
    except Exception as error:  # any code of the user's may run here
        raise CalibrationError(
            f"sparsify compares with a copy of the dense model, and {type(model).__name__} cannot be copied: "
            f"{type(error).__name__}: {error}"
        ) from error


def _value(tensor: Tensor) -> Tensor:
    return tensor.detach()


# masks of secateur.prune ------------------------------------------------------------------------------------------


def _unmasked(model: nn.Module) -> list[str]:
    """Make masks that are there permanent for a while; the names of their weights."""
    found = []
    for prefix, module in model.named_modules():
        for name in [key.removesuffix("_orig") for key in module._parameters if key.endswith("_orig")]:
            if find_hook(module, name)[1] is not None:
                remove(module, name)
                found.append(f"{prefix}.{name}".lstrip("."))
    return found


def _mask(model: nn.Module, names: Sequence[str]) -> None:
    """Put masks on weights that keep what is zero at zero, in all modules that hold them: they stay shared."""
    chosen = {id(weight): weight for weight in map(model.get_parameter, names)}
    for module in model.modules():
        held = [(own, chosen[id(weight)]) for own, weight in module._parameters.items() if id(weight) in chosen]
        for own, weight in held:
            custom_from_mask(module, own, (weight != 0).to(weight.dtype))


# what follows a solution ------------------------------------------------------------------------------------------


@torch.no_grad()
def _take_statistics(model: nn.Module, batches: Sequence[Any]) -> None:
    """Give batch norms the mean and variance that the batches have now."""
    norms = [m for m in model.modules() if isinstance(m, BatchNorm) and m.track_running_stats]
    if not norms:
        return
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
            norm.training = True
        for batch in batches:
            call(model, batch)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm, momentum in momenta.items():
            norm.momentum = momentum


def _agreement(dense: nn.Module, sparse: nn.Module, batches: Sequence[Any]) -> Agreement | None:
    """How far the outputs of both models are apart."""
    seen = Differences()
    for batch in batches:
        with calibrating(dense, sparse):
            seen.add(*(list(tensors_in(call(model, batch))) for model in (dense, sparse)))
    return seen.agreement()


__all__ = ["sparsify"]
