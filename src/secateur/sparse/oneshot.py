"""Zeros in a model in one call: layer by layer, from a little data, without training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from secateur.arguments import FLAG, NAMES, an_instance, check, listed, optional, shown
from secateur.calibrate import calibrating, call
from secateur.calibrate.blame import blamed_on_batch
from secateur.calibrate.data import taken
from secateur.calibrate.statistics import has_statistics, statistics_anew
from secateur.distributed import meet, together
from secateur.errors import CalibrationError, PlanError
from secateur.importance import Magnitude, Wanda
from secateur.pipeline.sharded import Shard, sharded_anew, unwrapped
from secateur.prune import custom_from_mask, remove
from secateur.prune.sites import find_hook
from secateur.sparse.admm import ADMM
from secateur.sparse.layers import Survey, chosen
from secateur.sparse.magnitude import magnitude
from secateur.sparse.patterns import NM, Pattern
from secateur.sparse.problem import Method
from secateur.sparse.report import Agreement, Differences, Sparsified, described
from secateur.sparse.ria import RIA
from secateur.sparse.solve import Solver
from secateur.sparse.sparsegpt import SparseGPT
from secateur.sparse.spread import Spread
from secateur.sparse.wanda import wanda
from secateur.state.transaction import transaction
from secateur.state.twin import copied

_PATTERN = an_instance(Pattern, "a pattern, such as Unstructured(0.5) or NM(2, 4)")
_SPREAD = optional(an_instance(Spread, "Prices() or ERK()"))
_OURS = (type(None), ADMM, SparseGPT, RIA, Magnitude, Wanda)
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
    shard: Shard | None = None,
) -> Sparsified:
    """Set weights of a model to zero by a pattern, and the others so that its outputs stay what they were; in place.

    >>> import secateur as sec, torch
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
    nothing: whatever goes wrong, the model is as it was. In a process group every rank is sent the batches of all, and
    a model that is spread over ranks takes `shard`, as in `compress`.
    """
    with together("sparsify"):
        check("sparsify", PlanError, locals(), masks=FLAG)
        job = OneShot(pattern, method, protect, include, spread, streams, statistics)
        inner, read = unwrapped(model, shard, "sparsify"), taken(batches, "sparsify")
        with read as data, judges(held_back) as kept_back, sharded_anew(inner, shard), transaction(inner) as undo:
            undo.keep(*inner.buffers())
            masked = _unmasked(inner)
            survey, names = job.surveyed(inner, data[0])
            dense = _dense_copy(inner, names)
            for name in set(names) - set(masked):  # those with a mask have other memory, and get theirs back
                undo.keep(inner.get_parameter(name), again=partial(_value, dense.get_parameter(name)))
            report = job.solved(dense, inner, (survey, names), data, kept_back)
            _mask(inner, [*masked, *(names if masks else ())])
            meet("sparsify: done")  # on every rank, or on none
    return report


@dataclass(frozen=True)
class OneShot:
    """Which zeros a model is to get, and how they are found."""

    pattern: Pattern
    method: Any = None
    protect: str | Sequence[str] = ()
    include: str | Sequence[str] = ()
    spread: Spread | None = None
    streams: bool = False
    statistics: bool = True
    begun: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        rules = {"protect": NAMES, "include": NAMES, "spread": _SPREAD, "streams": FLAG, "statistics": FLAG}
        check("sparsify", PlanError, vars(self), pattern=_PATTERN, **rules)
        _method(self.method)

    def surveyed(self, model: nn.Module, example: Any) -> tuple[Survey, tuple[str, ...]]:
        """What a run of the model multiplies data with, and which of these weights get zeros."""
        with calibrating(model):
            survey = Survey.of(model, example)
        return survey, chosen(survey, self.pattern, listed(self.protect), listed(self.include))

    def solved(
        self,
        dense: nn.Module,
        sparse: nn.Module,
        found: tuple[Survey, tuple[str, ...]],
        batches: Sequence[Any],
        held_back: Sequence[Any],
    ) -> Sparsified:
        """Put zeros into a model whose weights are those of a dense one, which is only read; what came of it."""
        survey, names = found
        patterns = _patterns(self.pattern, self.spread, dense, names, batches)
        solve, ours = _method(self.method), isinstance(self.method, _OURS)
        solver = Solver(dense, sparse, solve, patterns, survey.streams if self.streams else {}, ours)
        _solve_all(solver, survey, batches)
        if self.statistics and has_statistics(sparse):
            with statistics_anew(sparse):
                for number, batch in enumerate(batches):
                    with blamed_on_batch(number, "sparsify"):
                        call(sparse, batch)
        layers, alone = solver.layers(), solver.left_alone(survey)
        agreement = _agreement(dense, sparse, held_back)
        took = time.perf_counter() - self.begun
        return Sparsified(*described(self.pattern, self.method or solve), layers, alone, agreement, took)


def judges(held_back: Any) -> AbstractContextManager[Sequence[Any]]:
    """The batches that were held back, none if none were given."""
    return nullcontext(()) if held_back is None else taken(held_back, "sparsify: held_back")


def _patterns(
    pattern: Pattern, spread: Spread | None, model: nn.Module, names: Sequence[str], batches: Sequence[Any]
) -> dict[str, Pattern]:
    """The pattern of each parameter."""
    if spread is None:
        return dict.fromkeys(names, pattern)
    if isinstance(pattern, NM):
        raise PlanError(f"{pattern} is the same for every weight, so there is nothing to spread; leave spread= out")
    with calibrating(model):
        found = spread.sparsities(model, names, pattern.sparsity, batches)
    return {name: pattern.at(found[name]) for name in names}


def _solve_all(solver: Solver, survey: Survey, batches: Sequence[Any]) -> None:
    """First tables and what a run uses more than once or in parts, then the others in the order of the run."""
    wanted = set(solver.patterns)
    once = {name for name in wanted & survey.whole - survey.embeddings if survey.products[name] == 1}
    tables = wanted - survey.products.keys()
    with calibrating(solver.dense, solver.sparse):
        solver.looked_up(sorted(tables))
        solver.repeated(wanted - once - tables, batches)
        solver.once(once, batches)


def _method(given: Any) -> Method:
    if given is None:
        return ADMM()
    known = _CRITERIA.get(type(given))
    if known is None and not callable(given):
        raise PlanError(f"method is ADMM(), SparseGPT(), RIA(), Wanda(), Magnitude() or a function, not {shown(given)}")
    return given if known is None else known


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


def _agreement(dense: nn.Module, sparse: nn.Module, batches: Sequence[Any]) -> Agreement | None:
    """How far the outputs of both models are apart."""
    words = {module.num_embeddings for module in dense.modules() if isinstance(module, nn.Embedding)}
    seen = Differences()
    for number, batch in enumerate(batches):
        with calibrating(dense, sparse), blamed_on_batch(number, "sparsify: held_back"):
            seen.add(call(dense, batch), call(sparse, batch), words)
    return seen.agreement()


__all__ = ["OneShot", "judges", "sparsify"]
