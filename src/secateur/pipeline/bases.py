"""The basis of an axis in which a cut loses least: its first directions are what the model's output hangs on most.

Of an axis whose basis is free, a layer reads a with its weight W, and a change of its outputs by e changes the model's
by eᵀ F e (`calibrate.fisher`). Keep k directions U a and let the layer make the best of them: by least squares, with
the second moments H of a and M = Wᵀ F W, the loss is least where H^½ Uᵀ spans the first k eigenvectors of H^½ M H^½.
These spans lie one within the other, so one rotation serves every k: the rows of U, made orthogonal one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from secateur.distributed import pooled
from secateur.errors import VerifyError
from secateur.importance.reconstruction import InputMoments, MomentStore
from secateur.importance.weights import Weights
from secateur.pipeline.folds import measured
from secateur.pipeline.rotations import Places, free_places, rotate_all
from secateur.state.transaction import Transaction, untouched
from secateur.tracing.graph import Axis, Graph, Site

TURNED = 4  # batches that tell the basis of an axis: a small matrix
_FLOOR = 1e-6  # of the largest variance; below it there is nothing but rounding


@dataclass(frozen=True, eq=False)
class Bases:
    """The axes of a model that are free to rotate, and by what: (parts, size, size) for each."""

    weights: Weights
    matrices: Mapping[Places, Tensor]
    example: Any

    @staticmethod
    def of(graph: Graph, batches: Sequence[Any], axes: Sequence[Axis] | None = None) -> Bases:
        """Find both from data, of all axes or of some; without any, there are none."""
        weights = Weights(graph, [axis for axis in (graph.axes if axes is None else axes) if axis.exact])
        if not batches:
            return Bases(weights, {}, None)
        free = [own for own in free_places(weights, batches[0])[0].values() if own.read and _precise(own)]
        folds = measured(weights.model, (fold for own in free for fold in own.folds), batches)
        free = [own.folding(folds) for own in free]
        return Bases(weights, _bases(weights, free, batches) if free else {}, batches[0])

    @contextmanager
    def tried(self) -> Iterator[Bases]:
        """All that can be rotated is so for a while."""
        if not self.matrices:
            yield self
            return
        with untouched(self.weights.model) as undo:
            made = self
            try:
                self._rotate(self.matrices, undo)
            except VerifyError:  # of numbers so far apart that single precision does not do
                made = replace(self, matrices={})
            yield made

    def rotate(self, names: Collection[str], undo: Transaction) -> tuple[Places, ...]:
        """Rotate some of them for good, and say which."""
        chosen = {own: matrix for own, matrix in self.matrices.items() if own.axis.name in names}
        if chosen:
            self._rotate(chosen, undo)
        return tuple(chosen)

    def _rotate(self, chosen: Mapping[Places, Tensor], undo: Transaction) -> None:
        undo.keep(*(own.held[name] for own in chosen for name in own.tensors))
        rotate_all(self.weights, chosen, self.example)


def _precise(own: Places) -> bool:
    """Whether a rotated weight is about as good as it was: in half precision it is not."""
    return all(torch.finfo(own.held[name].dtype).eps < 1e-6 for name in own.tensors)


def _bases(weights: Weights, places: Sequence[Places], batches: Sequence[Any]) -> dict[Places, Tensor]:
    """For each axis and each of its parts an orthogonal matrix: what matters most comes first."""
    store, found = MomentStore(weights.model, batches), {}
    for number, own in enumerate(places):
        held = store.of(set(own.tensors), (name for later in places[number:] for name in later.tensors))
        spread, matters = torch.zeros(2, own.parts, own.axis.size, own.axis.size, dtype=torch.float64)
        for site in (site for sites in own.tensors.values() for site in sites):
            for moments in held.get(site.tensor, ()):
                _add(spread, matters, own, site, moments)
        if store.mine(number):
            found[number] = torch.stack([_basis(h, m) for h, m in zip(spread, matters, strict=True)])
    found = pooled("bases", found) if store.dealt else found
    return {own: found[number] for number, own in enumerate(places)}


def _add(spread: Tensor, matters: Tensor, own: Places, site: Site, moments: InputMoments) -> None:
    """Take in what a product reads of an axis: how each part of it varies, and how much that matters."""
    index = moments.summed(site.dim)
    if index is None or not moments.narrow:
        return
    varies, weight = moments.spread().double().cpu(), moments.weighted().cpu()
    for at, part in own.at(site):
        for group, there in enumerate(index):
            for number, one in zip(part.tolist(), at.T, strict=True):
                for columns in _columns(one, there):
                    spread[number] += varies[group][columns][:, columns]
                    matters[number] += weight[group][:, columns].T @ weight[group][:, columns]


def _columns(wanted: Tensor, there: Tensor) -> Tensor:
    """Where some indices are among those of summed elements, once for each tap of a kernel: (taps, wanted).

    >>> _columns(torch.tensor([2, 1]), torch.tensor([1, 1, 2, 2]))
    tensor([[2, 0],
            [3, 1]])
    """
    values, times = there.unique(return_counts=True)
    if not bool(torch.isin(wanted, values).all()) or int(times.amin()) != int(times.amax()):
        return wanted.new_empty(0, len(wanted))
    return there.argsort(stable=True).view(len(values), -1)[torch.searchsorted(values, wanted.contiguous())].T


def _basis(spread: Tensor, matters: Tensor) -> Tensor:
    """The rotation whose first rows keep most of what matters.

    >>> spread, matters = torch.diag(torch.tensor([1.0, 4.0]).double()), torch.eye(2).double()
    >>> _basis(spread, matters).abs().round()
    tensor([[0., 1.],
            [1., 0.]], dtype=torch.float64)
    """
    variance, axes = torch.linalg.eigh(spread)
    there = variance > _FLOOR * variance.amax().clamp_min(1e-30)
    root, inverse = (axes * torch.where(there, variance.abs() ** power, 0) @ axes.T for power in (0.5, -0.5))
    directions = torch.linalg.eigh(root @ matters @ root)[1].flip(1)
    return torch.linalg.qr(inverse @ directions)[0].T
