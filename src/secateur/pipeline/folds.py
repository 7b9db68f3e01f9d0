"""Scales that single positions have, put into weights: what is left is the same at every position, and can be rotated.

A vector that is the same at every position commutes with any rotation. So a model is written in another way that puts
out the same: a batch norm's scale goes into the product right before it, whose result has a variance of its own, and
the weight of an RMSNorm into the products that read what it scales. Which vectors and products these are, one run
tells; that the model still puts out what it did is for `rotations` to prove.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import Runs, calibrating
from secateur.calibrate.scales import Scaled, scaled, spreads
from secateur.calibrate.structure import Norm, Structure, structure
from secateur.importance.weights import Weights
from secateur.state.held import named_tensors
from secateur.tracing.graph import Axis, Site
from secateur.tracing.roles import Roles, scaling


@dataclass(frozen=True, eq=False)
class Fold:
    """A vector that scales an axis, by what it multiplies instead; afterwards it is the same at every position.

    A batch norm keeps a variance, that of what is rotated, and a weight that undoes it.
    """

    name: str
    scale: Tensor  # for each index of the vector, in double precision
    into: tuple[Site, ...]
    even: tuple[str, ...]  # vectors that are the same at every position afterwards
    norm: Norm | None = None
    spread: Tensor | None = None  # of a batch norm: how what it is given varies together, times the scale

    @property
    def touched(self) -> tuple[str, ...]:
        """All the tensors that it changes."""
        return (*self.even, *(site.tensor for site in self.into))

    def evened(self, name: str, tensor: Tensor, index: Tensor, matrices: Tensor) -> None:
        """Put into a vector, at indices (positions, times), what it is after a rotation by a matrix for each time."""
        norm = self.norm
        if norm is None or self.spread is None:
            tensor[index] = 1
            return
        for at, matrix in zip(index.T, matrices.to(self.spread), strict=True):
            varies = ((matrix @ self.spread[at][:, at]) * matrix).sum(1).clamp_min(0)
            tensor[at] = (varies if name == norm.var else ((varies + norm.eps) / (1 + norm.eps)).sqrt()).to(tensor)


class FoldableScales:
    """What scales the axes of a model, and whether products can do so instead."""

    def __init__(self, weights: Weights, known: Roles, example: Any) -> None:
        self._weights, self._known, self._example = weights, known, example
        self._tensors = dict(named_tensors(weights.model))
        self._vectors = scaling(weights.graph)

    @property
    def vectors(self) -> frozenset[str]:
        """All that scale some axis."""
        return frozenset(name for names in self._vectors.values() for name in names)

    def of(self, axis: Axis) -> tuple[tuple[Fold, ...], str]:
        """How each vector that scales an axis can be folded; if one cannot, why."""
        left, folds = dict(self._vectors.get(axis.atom, {})), []
        if left and isinstance(self._followed, Exception):
            why = f"its run cannot be followed ({type(self._followed).__name__}: {self._followed})"
            return (), f"the scale of {next(iter(left))} cannot be folded: {why}"
        for product, norm in self._seen[0].norms.items() if left else ():
            if norm.var in left:
                fold, why = self._behind(axis, product, norm)
                if fold is None:
                    return (), f"the scale of {norm.var} cannot be folded: {why}"
                folds.append(fold)
                left = {name: how for name, how in left.items() if name not in (*fold.even, norm.mean, norm.bias)}
        for name, how in left.items():
            fold, why = self._before(axis, name, how)
            if fold is None:
                return (), f"the scale of {name} cannot be folded: {why}"
            folds.append(fold)
        return tuple(folds), ""

    @cached_property
    def _followed(self) -> tuple[Structure, Scaled] | Exception:
        model = self._weights.model
        try:
            with calibrating(model), Runs(model, [self._example], what="rotations") as runs:
                return structure(runs), scaled(runs)
        except Exception as error:  # any code of the user's may run here
            return error

    @property
    def _seen(self) -> tuple[Structure, Scaled]:
        """What one run told."""
        assert not isinstance(self._followed, Exception)
        return self._followed

    def _behind(self, axis: Axis, product: str, norm: Norm) -> tuple[Fold | None, str]:
        """A batch norm's scale, put into the product before it."""
        found, scaled_by = self._seen
        if found.products[product] != 1 or found.means[norm.mean] != 1 or norm.var is None:
            return None, f"{product}, whose result it scales, is used more than once, or shares its norm"
        if norm.weight is None:
            return None, "the norm has no weight that could make up for another variance"
        var, weight = (self._tensors[name].detach().double() for name in (norm.var, norm.weight))
        scale = weight * ((1 + norm.eps) / (var + norm.eps)).sqrt()
        makes = [s for s in axis.sites if s.tensor == product and s in self._known.makes - self._known.reads]
        into = [*makes, Site(norm.mean, 0)]
        into += [Site(scaled_by.biases[product], 0)] if product in scaled_by.biases else []
        if len(makes) != 1 or not all(self._alike(axis, site, norm.var) for site in into):
            return None, f"its channels are not those of {product}"
        return Fold(norm.var, scale, tuple(into), (norm.var, norm.weight), norm, torch.diag(scale.square() * var)), ""

    def _before(self, axis: Axis, name: str, how: str) -> tuple[Fold | None, str]:
        """A vector, put into the products that read what it scales."""
        _, found = self._seen
        readers = [product for product, by in found.read.items() if name in by]
        if name in found.escaped:
            return None, f"what it scales also goes into {found.escaped[name]}"
        if not readers:
            return None, f"{how}, and no product is right before it or reads what it scales"
        into = []
        for product in readers:
            sites = [site for site in axis.sites if site.tensor == product and site in self._known.reads]
            if found.read[product] != {name}:
                return None, f"{product}, which reads what it scales, reads other data as well"
            if len(sites) != 1 or not self._alike(axis, sites[0], name):
                return None, f"its positions are not those that {product} sums over"
            if sites[0] in self._known.makes:
                return None, f"{product}, which reads what it scales, is also what makes it (tied)"
            into += sites
        return Fold(name, self._tensors[name].detach().double(), tuple(into), (name,)), ""

    def _alike(self, axis: Axis, site: Site, vector: str) -> bool:
        """Whether the axis is at the same indices in a dimension as in a vector."""
        weights = self._weights
        mine, its = (weights.owned(s.tensor, s.dim).get(axis.atom, []) for s in (site, Site(vector, 0)))
        sizes = {weights.graph.layouts[s.tensor][s.dim].size for s in (site, Site(vector, 0))}
        return (
            len(mine) == len(its)
            and len(sizes) == 1
            and all(
                torch.equal(a, b) for one, other in zip(mine, its, strict=True) for a, b in zip(one, other, strict=True)
            )
        )


def measured(model: nn.Module, folds: Iterable[Fold], batches: Sequence[Any]) -> Mapping[Fold, Fold]:
    """Batch norms as data tell how what they are given varies together: the variances alone tell less."""
    norms = {fold.norm.mean: fold for fold in folds if fold.norm is not None}
    found = {}
    for name, spread in spreads(model, {name: len(fold.scale) for name, fold in norms.items()}, batches).items():
        scale = norms[name].scale.to(spread)
        if bool(spread.isfinite().all()):
            found[norms[name]] = replace(norms[name], spread=spread * scale.outer(scale))
    return found
