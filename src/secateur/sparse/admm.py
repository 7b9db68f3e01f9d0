"""Sparse least squares by the alternating direction method of multipliers, as in ALPS (Meng et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.arguments import FLAG, a_number, an_int, check_fields, optional
from secateur.errors import PlanError
from secateur.sparse.patterns import Pattern
from secateur.sparse.problem import Problem

_INPUTS_PER_ROW = 0.5  # the ridge at which a layer of a language model did best on data held back, for any number
_LEAST = 0.01
_MOST = 10_000  # rounds, steps, refits


@dataclass(frozen=True)
class ADMM:
    """The layer's weights with zeros, solved for together, towards what the layer of the dense model puts out.

    >>> from secateur.sparse.patterns import Unstructured
    >>> x = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    >>> ADMM(ridge=0.01)(Problem.of(torch.tensor([[1.0, 2.0]]), x), Unstructured(0.5)).flatten()
    tensor([0.0000, 2.9...])

    A dense solution and its nearest sparse one pull at each other, `steps` times at each of `rounds` strengths, each
    `growth` times the one before, until they agree on where the zeros are; then the weights that stay are refitted.
    `ridge` holds all near the weight, by this share of the mean square of an input; None takes half the number of
    inputs over the number of rows of data, so that few data do not say more than they know. With `dense=False` the
    target is what the layer itself makes of its inputs, as in SparseGPT.
    """

    ridge: float | None = None
    start: float = 0.03
    growth: float = 1.8
    rounds: int = 8
    steps: int = 2
    refits: int = 12
    dense: bool = True

    def __post_init__(self) -> None:
        positive, few = a_number(above=0, below=1e6), an_int(0, _MOST)
        check_fields(self, PlanError, ridge=optional(a_number(least=0)), start=positive, growth=positive, dense=FLAG)
        check_fields(self, PlanError, rounds=few, steps=few, refits=few)

    def __call__(self, problem: Problem, pattern: Pattern) -> Tensor:
        made = (problem if self.dense else problem.own).damped(self._ridge(problem))
        scale = made.xx.diagonal(dim1=-2, dim2=-1).sqrt()
        xx = made.xx / (scale.unsqueeze(1) * scale.unsqueeze(2))  # every input at unit size
        yx = made.yx / scale.unsqueeze(1)
        price = problem.price.to(xx).clamp_min(1e-30).unsqueeze(2)

        def mask_of(weight: Tensor) -> Tensor:
            return problem.mask(weight.square() * price, pattern)

        weight = problem.weight.to(xx) * scale.unsqueeze(1)
        mask = mask_of(weight)
        sparse, pull = torch.where(mask, weight, 0), torch.zeros_like(weight)
        strength = self.start
        for _ in range(self.rounds):
            solve = _solver(xx, strength, few=self.steps * weight.shape[1] < weight.shape[2])
            for _ in range(self.steps):
                weight = solve(yx - pull + strength * sparse)
                both = weight + pull / strength
                mask = mask_of(both)
                sparse = torch.where(mask, both, 0)
                pull = pull + strength * (weight - sparse)
            strength *= self.growth
        fitted = on_support(xx, yx, mask, sparse, self.refits)
        return (fitted / scale.unsqueeze(1)).to(problem.weight.dtype)

    def _ridge(self, problem: Problem) -> float:
        if self.ridge is not None:
            return self.ridge
        share = _INPUTS_PER_ROW * problem.xx.shape[-1] / problem.rows if problem.rows else 0.0
        return min(max(share, _LEAST), 1.0)


def _solver(xx: Tensor, strength: float, few: bool) -> Callable[[Tensor], Tensor]:
    """What multiplies rows by the inverse of `xx` plus a strength; if they are few, it is not worth to compute it."""
    factor = torch.linalg.cholesky(xx + strength * torch.eye(xx.shape[-1], dtype=xx.dtype, device=xx.device))
    if few:
        return lambda rows: torch.cholesky_solve(rows.mT, factor).mT
    inverse = torch.cholesky_inverse(factor)
    return lambda rows: rows @ inverse


def on_support(xx: Tensor, yx: Tensor, mask: Tensor, start: Tensor, steps: int) -> Tensor:
    """The least-squares weights that are zero outside of a mask, by conjugate gradients, all rows at once.

    >>> yx, mask = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[True, False]]])
    >>> on_support(torch.eye(2)[None], yx, mask, torch.zeros(1, 1, 2), steps=2)
    tensor([[[3., 0.]]])
    """
    weight = torch.where(mask, start, 0)
    rest = torch.where(mask, yx - weight @ xx, 0)
    along, size = rest, rest.square().sum(-1, keepdim=True)
    least = 1e-14 * size.clamp_min(torch.finfo(size.dtype).tiny)
    for _ in range(steps):
        ahead = torch.where(mask, along @ xx, 0)
        curve = (along * ahead).sum(-1, keepdim=True)
        step = torch.where((size > least) & (curve > 0), size / curve.clamp_min(torch.finfo(curve.dtype).tiny), 0)
        weight = weight + step * along
        rest = rest - step * ahead
        new = rest.square().sum(-1, keepdim=True)
        along = rest + along * torch.where(size > least, new / size.clamp_min(torch.finfo(size.dtype).tiny), 0)
        size = new
    return weight
