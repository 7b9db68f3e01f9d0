"""Removing the rows that a structured pruner has masked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secateur.ao.chains import apply_patterns
from secateur.ao.config import module_to_fqn
from secateur.ao.errors import SparsifierRuntimeError, SparsifierValueError
from secateur.ao.example import call_of, stop_recording
from secateur.ao.fold import BiasFolds
from secateur.ao.gates import align, masked_layers
from secateur.ao.opened import Opened, inner, is_output, outer, precise_run, run
from secateur.ao.parametrization import FakeStructuredSparsity, find_mask, module_contains_param, unmasked
from secateur.ao.survey import Decision, RemovalSurvey
from secateur.errors import VerifyError
from secateur.pipeline.apply import Proof, proved, remember
from secateur.planning.plans import Change, Plan, make_plan
from secateur.state.transaction import Transaction, transaction
from secateur.tracing import Graph, trace
from secateur.tracing.examples import Inputs
from secateur.verify.oracle import distance, expected

if TYPE_CHECKING:
    from secateur.ao.structured import BaseStructuredSparsifier

Reasons = tuple[tuple[str, str], ...]
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # by the dtype of a bias that took a constant


@dataclass(frozen=True)
class Removal:
    """
    >>> Removal({"0.weight": 2}, (("2.weight", "1 of 4 rows: a dimension of the model's input"),)).removed
    {'0.weight': 2}

    What `prune` did: how many rows of each tensor it removed; which tensors have rows that stayed, masked, and
    why; and at which tensors the pruned model does not compute what the masked one did, and why.
    """

    removed: Mapping[str, int] = field(default_factory=dict)
    kept_masked: Reasons = ()
    inexact: Reasons = ()


def remove(pruner: "BaseStructuredSparsifier", example: Any = None, strict: bool = False) -> Removal:
    """Remove the masked rows from the pruner's model, in place, or leave everything as it was."""
    model = pruner.model
    _check_ready(pruner)
    with transaction(model, pruner) as undo:
        undo.keep(*(model.parameters() if pruner.patterns else ()))
        apply_patterns(model, pruner.patterns)
        masks: dict[str, Tensor] = {}
        for group in pruner.groups:
            mask = find_mask(group["module"], group["tensor_name"])
            if mask is not None:
                name = f"{module_to_fqn(model, group['module'])}.{group['tensor_name']}".removeprefix(".")
                masks[name] = mask.detach().ne(0).cpu().clone()
                pruner._make_final(group)
        call = call_of(model, example) if any(not bool(mask.all()) for mask in masks.values()) else None
        if not any(module_contains_param(module, FakeStructuredSparsity) for module in model.modules()):
            stop_recording(model)
        return Removal() if call is None else _opened(model, masks, call).carry_out(strict)


def _check_ready(pruner: "BaseStructuredSparsifier") -> None:
    modules = dict(pruner.model.named_modules(remove_duplicate=False))
    for group in pruner.groups:
        name, module = group["tensor_fqn"], modules.get(group["module_fqn"])
        if module is None or module is not group["module"]:
            raise SparsifierValueError(
                f"{name}: the model has another module there than when it was prepared; prepare it again"
            )
        mask = find_mask(module, group["tensor_name"])
        if mask is None:
            raise SparsifierValueError(
                f"{name}: carries no mask, so there are no rows to remove; call prepare() before prune(), "
                "and prune() once"
            )
        rows = unmasked(module, group["tensor_name"]).shape[:1]
        if mask.shape != rows:
            raise SparsifierValueError(
                f"{name}: the mask is {tuple(mask.shape)} and the tensor has {rows[0]} rows; give one value per row"
            )


def _opened(model: nn.Module, masks: Mapping[str, Tensor], call: Inputs) -> "_Operation":
    """Run and trace a model whose masks are final, with its outputs opened."""
    made, dtype = precise_run(model, call)
    opened = Opened(model, made)
    masks = {outer(name): mask for name, mask in masks.items()}
    return _Operation(model, masks, call, dtype, opened, opened.pieces(made), trace(opened, call))


@dataclass(frozen=True, eq=False)
class _Operation:
    """One removal."""

    model: nn.Module
    masks: Mapping[str, Tensor]
    call: Inputs
    dtype: torch.dtype
    opened: Opened
    before: list[Tensor]  # what the model put out
    graph: Graph  # of the opened model

    def carry_out(self, strict: bool) -> Removal:
        survey, decision, left = self._decide()
        chosen = {axis: (~gone).nonzero().flatten() for axis, gone in decision.removed.items()}
        plan = make_plan(self.graph, chosen)
        removal = self._report(plan, decision, left)
        if strict and (removal.kept_masked or removal.inexact):
            raise SparsifierRuntimeError(_complaint(removal))
        if plan.axes:
            self._cut(plan, BiasFolds(survey, decision), exact=not decision.inexact)
        return removal

    def _decide(self) -> tuple[RemovalSurvey, Decision, dict[str, str]]:
        """Join the gates of recurrent layers, as far as the units so made can then really go."""
        layers = masked_layers(self.opened, self.masks)
        while True:
            unmoved = Transaction(*(layer.module for layer in layers))
            moved = {layer: masks for layer in layers if (masks := align(layer, self.masks)) is not None}
            masks = {**self.masks, **{name: mask for made in moved.values() for name, mask in made.items()}}
            survey = RemovalSurvey(self.opened, self.graph, self.call, self.dtype)
            decision = survey.decide(masks)
            left = survey.leftover(masks, decision)
            stuck = [layer for layer in moved if any(name in left for name in layer.matrices())]
            if not stuck:
                joined = {name for layer in moved for name in layer.matrices()}
                for axis in decision.removed:
                    if any(site.tensor in joined and site.dim == 0 for site in axis.sites):
                        decision.inexact[axis] = "its gates mask different hidden units, and were joined by position"
                return survey, decision, left
            unmoved.roll_back()
            layers = [layer for layer in layers if layer not in stuck]

    def _report(self, plan: Plan, decision: Decision, left: Mapping[str, str]) -> Removal:
        kept = {name: plan.kept.get(name, {}).get(0) for name in self.masks}
        removed = {inner(name): len(self.masks[name]) - len(rows) for name, rows in kept.items() if rows is not None}
        inexact = {
            inner(site.tensor): reason
            for axis, reason in decision.inexact.items()
            for site in axis.sites
            if site.dim == 0 and site.tensor in self.masks
        }
        return Removal(removed, tuple((inner(name), why) for name, why in left.items()), tuple(inexact.items()))

    def _cut(self, plan: Plan, folds: BiasFolds, exact: bool) -> None:
        def finish(_: object) -> None:
            folds.carry_out(plan)
            if exact:
                self._compare(plan, folds)
            remember(self.model, _of_the_model(plan, self.graph))

        proof = [] if exact else [Proof(self.call, expected(self.opened, plan, self.call))]
        proved(self.opened, plan, proof, finish)

    def _compare(self, plan: Plan, folds: BiasFolds) -> None:
        """The pruned model must put out what the masked one did, as far as its outputs are still there."""
        tolerance = max((_TOLERANCE.get(dtype, 2e-2) for dtype in (self.dtype, *folds.dtypes)), default=0.0)
        after = self.opened.pieces(run(self.model, self.call, self.dtype))
        for i, (want, got) in enumerate(zip(self.before, after, strict=True)):
            kept = plan.kept.get(f"output{i}", {}).get(0)
            flat = want.flatten() if kept is None else want.flatten()[list(kept)]
            if not (difference := distance(flat, got.flatten())) <= tolerance:
                raise VerifyError(
                    f"prune: output {i} of the pruned model differs by {difference:.2g} of its scale from that of the "
                    "masked one. The model is as it was. Please report this; squash_mask() makes the masks final "
                    "at full size"
                )


def _complaint(removal: Removal) -> str:
    problems = [*removal.kept_masked, *removal.inexact]
    some = "; ".join(f"{name}: {reason}" for name, reason in problems[:3])
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return f"prune(strict=True): not every masked row can be removed exactly. {some}{more}"


def _of_the_model(plan: Plan, graph: Graph) -> Plan:
    """A plan for the opened model as one for the model itself."""
    sizes = {name: dims[0].size for name, dims in graph.layouts.items() if is_output(name)}
    left = {name: len(plan.kept[name][0]) if name in plan.kept else size for name, size in sizes.items()}

    def without(change: Change, each: int) -> Change:
        return Change(change.before - each * sum(sizes.values()), change.after - each * sum(left.values()))

    return replace(
        plan,
        axes=tuple(replace(axis, name=inner(axis.name)) for axis in plan.axes),
        kept={inner(name): dims for name, dims in plan.kept.items() if not is_output(name)},
        shapes={inner(name): shape for name, shape in plan.shapes.items() if not is_output(name)},
        attributes=tuple((_inside(place), was, now) for place, was, now in plan.attributes),
        kept_in_attributes=tuple((_inside(place), dims) for place, dims in plan.kept_in_attributes),
        macs=without(plan.macs, 1),
        params=without(plan.params, 1),
        bytes=without(plan.bytes, 4),
        example=None,
    )


def _inside(place: Any) -> Any:
    return replace(place, owner=inner(place.owner) if place.owner != "model" else "")
