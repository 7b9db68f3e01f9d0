"""Among which positions a position is ranked: those of its axis, of all axes, or of axes that look alike."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from secateur.arguments import shown
from secateur.axes import Atom, Layout, Product, atoms
from secateur.errors import PlanError
from secateur.tracing.graph import Axis, Graph

Normalisation = Literal["none", "mean", "max", "sum"]

_SCALES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda sizes: torch.ones((), dtype=torch.float64),
    "mean": torch.mean,
    "max": torch.amax,
    "sum": torch.sum,
}


def check_normalisation(how: object) -> None:
    """Refuse what is not the name of a normalisation."""
    if not isinstance(how, str) or how not in _SCALES:
        raise PlanError(f"normalise is one of {', '.join(map(repr, _SCALES))}, not {shown(how)}")


def normalised(scores: Tensor, how: Normalisation) -> Tensor:
    """Scores as multiples of their mean, largest or summed size.

    >>> normalised(torch.tensor([1.0, 2.0, 3.0]), "mean")
    tensor([0.5000, 1.0000, 1.5000], dtype=torch.float64)

    An infinite score stays infinite and has no part in the scale; scores that are all zero stay zero.
    """
    scores = scores.detach().to("cpu", torch.float64)
    sizes = scores[scores.isfinite()].abs()
    scale = _SCALES[how](sizes) if len(sizes) else torch.ones((), dtype=torch.float64)
    return scores / scale if scale > 0 else scores


class Scope(ABC):
    """Makes the scores of different axes comparable: what is lowest of all should go first.

    >>> sorted(SCOPES)
    ['axis', 'global', 'isomorphic']
    """

    @abstractmethod
    def compared(self, scores: Mapping[Axis, Tensor], graph: Graph) -> dict[Axis, Tensor]:
        """Scores that can be compared across axes, in the order of the given ones within each."""


@dataclass(frozen=True)
class PerAxis(Scope):
    """Each axis by itself: a score becomes the share of the axis that it is not below.

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> rank({graph.axes[0]: torch.tensor([7.0, 1.0, 5.0, 0.0])}, PerAxis(), graph)[graph.axes[0]]
    tensor([1.0000, 0.5000, 0.7500, 0.2500], dtype=torch.float64)

    What is at most t is the fraction t of every axis.
    """

    def compared(self, scores: Mapping[Axis, Tensor], graph: Graph) -> dict[Axis, Tensor]:
        """The place of each score in its axis, from 1/size to 1."""
        return {axis: _shares({axis: own})[axis] for axis, own in scores.items()}


@dataclass(frozen=True)
class Global(Scope):
    """All axes together, each at its own scale.

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> graph = sec.trace(net, torch.zeros(1, 4))
    >>> rank({graph.axes[0]: torch.tensor([1.0, 2.0, 3.0, 2.0])}, Global("mean"), graph)[graph.axes[0]]
    tensor([0.5000, 1.0000, 1.5000, 1.0000], dtype=torch.float64)

    `normalise` says what scores are divided by, axis by axis: their "mean", "max", "sum", or nothing ("none", for
    criteria that are in the same unit everywhere, such as `Taylor`, `Hessian` and `LAMP`).
    """

    normalise: Normalisation = "mean"

    def __post_init__(self) -> None:
        check_normalisation(self.normalise)

    def compared(self, scores: Mapping[Axis, Tensor], graph: Graph) -> dict[Axis, Tensor]:
        """Scores over the scale of their axis."""
        return {axis: normalised(own, self.normalise) for axis, own in scores.items()}


@dataclass(frozen=True)
class Isomorphic(Scope):
    """Axes with the same shape of subgraph together (Fang et al., 2024).

    >>> import secateur as sec
    >>> net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)), torch.nn.LayerNorm(2))
    >>> graph = sec.trace(net, torch.zeros(1, 2))
    >>> one, two = graph.axes
    >>> ranked = rank({one: torch.tensor([1.0, 3.0]), two: torch.tensor([2.0, 4.0])}, Isomorphic("none"), graph)
    >>> ranked[one], ranked[two]
    (tensor([0.2500, 0.7500], dtype=torch.float64), tensor([0.5000, 1.0000], dtype=torch.float64))

    Two axes are alike when they have the same place in the same dimensions of the same parameters of the same kinds of
    layers, equally often; widths and names do not matter. Among those, scores compete at the scale that `normalise`
    says, as in `Global`. A score becomes the share of its kind that it is not below, so what is at most t is the
    fraction t of every kind.
    """

    normalise: Normalisation = "mean"

    def __post_init__(self) -> None:
        check_normalisation(self.normalise)

    def compared(self, scores: Mapping[Axis, Tensor], graph: Graph) -> dict[Axis, Tensor]:
        """The place of each score among the axes of its kind."""
        kinds: dict[Hashable, dict[Axis, Tensor]] = {}
        for axis, own in scores.items():
            kinds.setdefault(signature(axis, graph), {})[axis] = normalised(own, self.normalise)
        found = {axis: shares for alike in kinds.values() for axis, shares in _shares(alike).items()}
        return {axis: found[axis] for axis in scores}


SCOPES: Mapping[str, Scope] = {"axis": PerAxis(), "global": Global(), "isomorphic": Isomorphic()}


def rank(scores: Mapping[Axis, Tensor], scope: Scope | str, graph: Graph) -> dict[Axis, Tensor]:
    """Make the scores of axes comparable: what is lowest of all should go first.

    >>> rank({}, "global", None)
    {}

    `scope` is `PerAxis()`, `Global(normalise)`, `Isomorphic(normalise)`, or "axis", "global" or "isomorphic" for one
    of these as it comes. Within an axis the order of scores stays; of equals, the first is the higher.
    """
    found = SCOPES.get(scope) if isinstance(scope, str) else scope
    if not isinstance(found, Scope):
        raise PlanError(
            f"scope is one of {', '.join(map(repr, SCOPES))}, or a Scope such as Global('max'), not {scope!r}"
        )
    return found.compared(scores, graph)


def signature(axis: Axis, graph: Graph) -> Hashable:
    """What is the same for axes with the same shape of subgraph: the kinds of their sites, each with its number."""
    modules = dict(graph.model.named_modules())
    sites: Counter[Hashable] = Counter()
    for site in axis.sites:
        owner, _, leaf = site.tensor.rpartition(".")
        module = modules[owner]
        shared = getattr(module, "groups", 1) not in (1, None)
        place = _place(graph.layouts[site.tensor][site.dim], axis.atom)
        sites[type(module), re.sub(r"\d+", "#", leaf), site.dim, shared, place] += 1
    return frozenset(sites.items())


def _place(layout: Layout, atom: Atom) -> Hashable:
    """Where in a layout an axis is: heads are not like the dims of each, nor like plain channels."""
    if isinstance(layout, Atom):
        return "this" if layout is atom else "another" if layout.fixed is None else "fixed"
    parts = layout.parts if isinstance(layout, Product) else (part for part in layout.parts if atom in atoms(part))
    return (type(layout), *(_place(part, atom) for part in parts))


def _shares(scores: Mapping[Axis, Tensor]) -> dict[Axis, Tensor]:
    """Which share of all these scores each one is not below; of equals, the first is the higher."""
    flat = torch.cat([own.detach().to("cpu", torch.float64) for own in scores.values()])
    order = flat.argsort(descending=True, stable=True)
    places = torch.arange(len(flat), 0, -1, dtype=torch.float64) / len(flat)
    shares = torch.empty_like(flat).index_copy_(0, order, places)
    return dict(zip(scores, shares.split([len(own) for own in scores.values()]), strict=True))
