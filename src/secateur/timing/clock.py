"""A latency model: what a run takes for any counts, learnt from timings of its ops at a few sizes."""

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from secateur.axes import Atom, Layout, free_atoms, size_after
from secateur.planning.problem import CostModel
from secateur.progress import progress
from secateur.state.chances import same_chances
from secateur.timing import surface as maths
from secateur.timing.measure import sample
from secateur.timing.replay import Arena, Variables, elements, key, prepared, signature, timed, variables, writes
from secateur.timing.surface import Bulk, Surface
from secateur.tracing.graph import Graph

OpSizes = tuple[int, ...]  # a size for each variable of an op
Times = Surface | Bulk

_KNOTS = {0: 1, 1: 6, 2: 5, 3: 3, 4: 2, 5: 2}  # of each size, by how many sizes an op has
_PASSES = 5  # over all sizes of an op; the fastest counts
_PATIENCE = 0.3  # seconds for the passes of one op, beyond the first
_SAMPLE = 2e-4  # seconds that one sample should last
_WORTH = 0.01  # of the whole: an op that takes less need not show its steps


@dataclass(frozen=True, eq=False)
class _Term:
    """So many ops of one kind, at the sizes of these layouts."""

    surface: Times
    layouts: tuple[Layout, ...]
    times: int


class Clock:
    """Predicts seconds per run from the counts of the axes.

    Only the ops: what Python takes between them is not part of it.
    """

    def __init__(self, terms: Sequence[_Term]) -> None:
        self._terms = terms
        self._touched: dict[Atom, list[_Term]] = {}
        for term in terms:
            for atom in {atom for layout in term.layouts for atom in free_atoms(layout)}:
                self._touched.setdefault(atom, []).append(term)
        self._known: dict[tuple[Times, OpSizes], float] = {}

    @staticmethod
    def learnt(graph: Graph) -> "Clock":
        """Time the ops of a graph at a few sizes each."""
        kinds: dict[Hashable, Variables] = {}  # the first step of each signature
        uses: Counter[tuple[Hashable, tuple[Hashable, ...]]] = Counter()
        layouts: dict[Hashable, Layout] = {}
        for step in graph.steps:
            if timed(step):
                of = variables(step)
                name = signature(of)
                kinds.setdefault(name, of)
                layouts |= {key(layout): layout for layout in of.layouts}
                uses[name, tuple(map(key, of.layouts))] += 1
        with torch.no_grad(), same_chances():
            often = Counter(name for name, _ in uses.elements())
            surfaces = _timed(kinds, often, Arena(CostModel.of(graph).bytes({})))
        return Clock(
            [_Term(surfaces[name], tuple(layouts[k] for k in keys), times) for (name, keys), times in uses.items()]
        )

    def __call__(self, counts: Mapping[Atom, int]) -> float:
        """Seconds that all ops of one run take when each axis keeps `counts`."""
        return sum(self._of(term, counts) for term in self._terms)

    def saved(self, counts: Mapping[Atom, int], change: Mapping[Atom, int]) -> float:
        """How much less it is after some counts change."""
        after = {**counts, **change}
        touched = dict.fromkeys(term for atom in change for term in self._touched.get(atom, ()))
        return sum(self._of(term, counts) - self._of(term, after) for term in touched)

    def _of(self, term: _Term, counts: Mapping[Atom, int]) -> float:
        place = (term.surface, tuple(size_after(layout, counts) for layout in term.layouts))
        known = self._known.get(place)
        if known is None:
            known = self._known[place] = term.surface(place[1])
        return term.times * known


def _timed(kinds: Mapping[Hashable, Variables], uses: Mapping[Hashable, int], arena: Arena) -> dict[Hashable, Times]:
    """The time of every kind of op as a function of its sizes."""
    found: dict[Hashable, Times] = {}
    for name, kind in progress(list(kinds.items()), "timing the layers"):
        found[name] = _surface(kind, arena) or _bulk(kind, arena)
    spent = {name: times(kinds[name].sizes) * uses[name] for name, times in found.items()}
    heavy = [name for name, seconds in spent.items() if seconds > _WORTH * sum(spent.values())]
    for name in progress(heavy, "looking for steps"):
        times = found[name]
        if isinstance(times, Surface):
            found[name] = replace(times, grains=_grains(kinds[name], arena))
    return found


def _surface(kind: Variables, arena: Arena) -> Surface | None:
    """Times at a grid of sizes; None where there are too many of them, or the op does not run at each by itself."""
    whole = kind.sizes
    if len(whole) not in _KNOTS:
        return None
    knots = tuple(maths.knots(n, _KNOTS[len(whole)]) for n in whole)
    times = _times(kind, list(itertools.product(*knots)), arena)
    if times is None:
        return None
    grid = np.array(times).reshape([len(k) for k in knots])
    return Surface(knots, maths.monotone(grid), (1,) * len(knots))


def _bulk(kind: Variables, arena: Arena) -> Bulk:
    """Times with all sizes reduced together; where that fails too, in proportion to the time at full size."""

    def count(sizes: Sequence[int]) -> int:
        return elements(kind.step, kind.shape(sizes))

    whole = kind.sizes
    points = [tuple(max(1, round(n * share)) for n in whole) for share in (0.25, 0.5, 0.75, 1.0)]
    times = _times(kind, points, arena)
    if times is None or len(set(map(count, points))) < len(points):
        return Bulk(count, (0, count(whole)), (0.0, (_times(kind, [whole], arena) or [0.0])[0]))
    return Bulk(count, tuple(map(count, points)), tuple(maths.monotone(np.array(times)).tolist()))


def _times(kind: Variables, points: Sequence[OpSizes], arena: Arena) -> list[float] | None:
    """Seconds of an op at each of the points, the fastest of several passes; None where it fails at one of them."""

    def run(numbers: Sequence[int]) -> list[float]:
        pairs = zip(points, numbers, strict=True)
        return [sample(prepared(kind.step, kind.shape(point), arena), number) for point, number in pairs]

    try:
        best = list(map(min, run([1] * len(points)), run([1] * len(points))))
        numbers = [max(1, round(_SAMPLE / max(seconds, 1e-9))) for seconds in best]
        pass_ = sum(seconds * number for seconds, number in zip(best, numbers, strict=True))
        for _ in range(min(max(round(_PATIENCE / pass_), 1), _PASSES)):
            best = list(map(min, best, run(numbers)))
        return best
    except Exception:  # kernels refuse with whatever they like
        return None
    finally:
        if writes(kind.step):
            arena.refill()


def _grains(kind: Variables, arena: Arena) -> OpSizes:
    """To multiples of what an op rounds each of its sizes."""
    whole, found = kind.sizes, []
    for i, size in enumerate(whole):
        near = maths.probes(size)
        times = _times(kind, [(*whole[:i], n, *whole[i + 1 :]) for n in near], arena) if near else None
        found.append(maths.grain(dict(zip(near, times, strict=True))) if times else 1)
    return tuple(found)
