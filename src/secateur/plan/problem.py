"""What a target decides about: axes that may be cut, their scores, and what any choice would cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from secateur.axes import Atom, Polynomial
from secateur.errors import PlanError
from secateur.importance import Context, Importance, Scope, rank
from secateur.plan.allocation import Counts, Ladder, Limit, Rung, ladder, losses
from secateur.plan.cost import CostModel
from secateur.plan.counts import components, settle, settle_group
from secateur.trace.graph import Axis, Graph

_TIED_RUNGS = 32  # steps in which axes whose counts depend on each other are cut
_USED_UP = 0.995  # the part of a budget that is enough
_HALVINGS = 10  # of the span of ratios in which a group's is looked for


@dataclass(frozen=True)
class Counted:
    """A cost that is counted, by what axes keep."""

    polynomial: Polynomial

    def __call__(self, counts: Counts) -> int:
        return self.polynomial(_by_atom(counts))

    def saved(self, counts: Counts, change: Counts) -> int:
        """How much less it is after some counts change."""
        return self.polynomial.difference(_by_atom(counts), _by_atom(change))


def matches(glob: str, axis: Axis) -> bool:
    """Whether a glob names an axis, or a tensor or module that the axis is part of."""
    names = {axis.name, *(site.tensor for site in axis.sites)}
    return any(fnmatchcase(name, pattern) for name in names for pattern in (glob, f"{glob}.*"))


class Problem:
    """The axes of a graph that may be cut, with a score for each position."""

    def __init__(
        self,
        graph: Graph,
        importance: Importance,
        *,
        exact: bool,
        protect: Sequence[str],
        round_to: int,
        scope: Scope | str | None = None,
    ) -> None:
        if isinstance(round_to, bool) or not isinstance(round_to, int) or round_to < 1:
            raise PlanError(f"round_to is a whole number from 1 on, not {round_to!r}")
        if not callable(importance):
            raise PlanError(f"importance is a function of a Context, such as Magnitude(), not {importance!r}")
        protect = (protect,) if isinstance(protect, str) else tuple(protect)
        for glob in protect:
            if not any(fnmatchcase(n, p) for n in graph.layouts for p in (glob, f"{glob}.*")) and not any(
                matches(glob, axis) for axis in graph.axes
            ):
                raise PlanError(f"protect: no tensor and no axis matches {glob!r}")
        self.graph = graph
        self.importance = importance
        self.round_to = round_to
        self.scope = scope
        self.axes = tuple(
            axis
            for axis in graph.axes
            if (axis.exact or not exact) and not any(matches(glob, axis) for glob in protect)
        )
        self._of_atom = {axis.atom: axis for axis in self.axes}
        costs = CostModel(graph)
        self.macs = Counted(costs.macs)  # multiply-accumulates of one run on the example
        self.params = Counted(costs.params)  # parameters, tied ones once
        self.bytes = Counted(costs.bytes)
        self._scores: dict[Axis, Tensor] = {}
        self._memo: dict[Any, Any] = {}

    # counts ----------------------------------------------------------------------------------------------------

    def counts(self, ratio: Callable[[Axis], float]) -> dict[Axis, int]:
        """What each axis keeps when the fraction `ratio(axis)` of it should go, with every size coming out right."""
        wanted = {axis.atom: self._keep(axis, ratio(axis)) for axis in self.axes}
        settled = settle(self.graph.sizes, wanted)
        return {self._of_atom[atom]: count for atom, count in settled.items() if atom in self._of_atom}

    def _keep(self, axis: Axis, ratio: float) -> int:
        return self._rounded(axis, axis.size - int(axis.size * ratio + 1e-9))

    def _rounded(self, axis: Axis, keep: int) -> int:
        """At least one position, a multiple of `round_to` where the axis is that large."""
        return min(-(-max(1, keep) // self.round_to) * self.round_to, axis.size)

    def fit(self, ratio: float, cost: Callable[[Counts], int], budget: float) -> dict[Axis, int]:
        """The counts at a ratio that fits, with what the budget leaves given back.

        Axes whose counts depend on each other move together, in large steps: each such group goes back as far as it
        can by itself, then all that depend on no other, until next to nothing is left to give.
        """
        ratios = dict.fromkeys(self.axes, ratio)
        counts = self.counts(ratios.__getitem__)
        groups = [[self._of_atom[a] for a in atoms if a in self._of_atom] for atoms, _ in components(self.graph.sizes)]
        tied = {axis for group in groups for axis in group}
        alone = [axis for axis in self.axes if axis not in tied]
        for group in (*groups, alone):
            if cost(counts) >= _USED_UP * budget:
                break
            low, high = 0.0, ratio
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                trial = ratios | dict.fromkeys(group, middle)
                more = self.counts(trial.__getitem__)
                if cost(more) <= budget:
                    high, ratios, counts = middle, trial, more
                else:
                    low = middle
        for axis in alone:
            more = {**counts, axis: min(counts[axis] + self.round_to, axis.size)}
            if cost(more) <= budget:
                counts = more
        return counts

    # budgets ---------------------------------------------------------------------------------------------------

    def ladders(self, limits: Sequence[Limit], least: float) -> list[Ladder]:
        """What axes can keep, from all down to the fraction `least`; those whose counts depend on each other as one."""
        scores = self._comparable(limits)
        tied = components(self.graph.sizes)
        ladders = []
        for atoms, constraints in tied:
            group = [self._of_atom[atom] for atom in atoms if atom in self._of_atom]
            if group:
                ladders.append(self._tied(group, atoms, constraints, scores, least))
        alone = set(self.axes) - {self._of_atom[a] for atoms, _ in tied for a in atoms if a in self._of_atom}
        for axis in self.axes:
            if axis in alone:
                fewest = self._rounded(axis, math.ceil(axis.size * least))
                ladders.append(ladder(axis, scores[axis], fewest, self.round_to))
        return ladders

    def _tied(
        self, group: list[Axis], atoms: list[Atom], constraints: Any, scores: Mapping[Axis, Tensor], least: float
    ) -> Ladder:
        """Axes whose counts depend on each other are cut by the same ratio, as near as sizes allow."""
        lost = {axis: losses(scores[axis]) for axis in group}
        rungs: dict[tuple[int, ...], Rung] = {}
        for n in range(_TIED_RUNGS + 1):
            wanted = {axis.atom: self._keep(axis, n / _TIED_RUNGS * (1 - least)) for axis in group}
            settled = settle_group(self.graph.sizes, atoms, constraints, wanted)
            counts = {axis: settled.get(axis.atom, axis.size) for axis in group}
            rung = Rung(counts, sum(lost[axis][axis.size - count] for axis, count in counts.items()))
            rungs.setdefault(tuple(counts.values()), rung)
        return tuple(sorted(rungs.values(), key=lambda rung: rung.lost))

    def _comparable(self, limits: Sequence[Limit]) -> dict[Axis, Tensor]:
        """Scores that can be compared across axes.

        Where nothing else is said, those of a criterion without a common unit count relative to their axis, and an
        axis as a whole counts as much as it costs: more cannot be told without data.
        """
        scores = {axis: self.scores(axis) for axis in self.axes}
        if self.scope is not None:
            return rank(scores, self.scope, self.graph)
        if getattr(self.importance, "comparable", False):
            return scores
        found = {}
        for axis, own in scores.items():
            worth = sum(limit.saving({}, {axis: 0}) / max(limit.limit, 1e-30) for limit in limits)
            found[axis] = own * (worth / float(own.sum().clamp_min(1e-300)))
        return found

    # positions -------------------------------------------------------------------------------------------------

    def scores(self, axis: Axis) -> Tensor:
        """A score per position of an axis: the higher, the more it matters."""
        if axis not in self._scores:
            self._scores[axis] = checked(self.importance(self._context(axis)), axis)
        return self._scores[axis]

    def _context(self, axis: Axis) -> Context:
        return Context(axis, self.graph, self._tensors, self._norms, self._memo)

    @cached_property
    def _norms(self) -> frozenset[str]:
        norms = (n for n, m in self.graph.model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase))
        return frozenset(f"{name}.weight".lstrip(".") for name in norms)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.graph.model.named_parameters(remove_duplicate=False))

    def best(self, counts: Counts) -> dict[Axis, Tensor]:
        """The best-scored positions of each axis, sorted; ties go to the first."""
        chosen = {}
        for axis, count in counts.items():
            if count < axis.size:
                order = torch.argsort(self.scores(axis), descending=True, stable=True)
                chosen[axis] = order[:count].sort().values
        return chosen

    def best_of(self, dead: Mapping[Axis, Tensor]) -> dict[Axis, Tensor]:
        """Remove the dead positions of each axis, as many as sizes allow."""
        wanted = {axis.atom: self._rounded(axis, axis.size - int(gone.sum())) for axis, gone in dead.items()}
        settled = settle(self.graph.sizes, wanted)
        chosen = {}
        for axis, gone in dead.items():
            keep = settled.get(axis.atom, axis.size)
            if keep < axis.size:
                order = torch.argsort((~gone).to(torch.int8), descending=True, stable=True)
                chosen[axis] = order[:keep].sort().values
        return chosen

    def dead(self) -> dict[Axis, Tensor]:
        """For each axis, which positions contribute nothing already."""
        from secateur.plan.zeros import dead_positions

        return dead_positions(self.graph, self.axes)


def checked(scores: object, axis: Axis) -> Tensor:
    """Refuse scores that are not one finite number per position."""
    if not isinstance(scores, Tensor) or tuple(scores.shape) != (axis.size,):
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise PlanError(f"the importance of {axis.name} must be a tensor of {axis.size} scores, not {shape}")
    if scores.isnan().any():
        raise PlanError(f"the importance of {axis.name} has NaN scores: are there NaN weights in {axis.sites[0]}?")
    return scores.detach().to("cpu", torch.float64)


def _by_atom(counts: Counts) -> dict[Atom, int]:
    return {axis.atom: count for axis, count in counts.items()}
