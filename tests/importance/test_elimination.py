"""Backward elimination, checked against inverting what is left anew each time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from secateur.importance.elimination import Regression, eliminate


def naively(moments: np.ndarray, weight: np.ndarray, owner: np.ndarray, size: int) -> np.ndarray:
    """The rise of the error of the best fit to `weight` with each position that goes, the cheapest first."""

    def error(left: set[int]) -> float:
        stay = np.array([o < 0 or o in left for o in owner])
        inner, cross = moments[np.ix_(stay, stay)], moments[np.ix_(stay, ~stay)]
        lost = moments[np.ix_(~stay, ~stay)] - cross.T @ np.linalg.solve(inner, cross) if stay.any() else moments
        return float(np.trace(weight[:, ~stay] @ lost @ weight[:, ~stay].T))

    left, floor, scores = set(range(size)), 0.0, np.zeros(size)
    while left:
        rises = {p: error(left - {p}) - error(left) for p in sorted(left)}
        first = min(rises, key=rises.get)
        floor = scores[first] = max(floor, rises[first])
        left.remove(first)
    return scores


@pytest.mark.parametrize(
    "owner",
    [
        list(range(12)),
        [3, 1, 0, 2, 4, 5, 7, 6],  # in another order
        [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3],  # a kernel's columns
        [0, 1, 2, 3, 0, 1, 2, 3],  # apart from each other
        [-1, 0, 1, -1, 2, 3, 4, -1],  # some that never go
        [0, 0, 1, 2, 2, -1, 3, 4, 4, 4],  # unequally many
    ],
    ids=["one-each", "permuted", "kernel", "apart", "unowned", "unequal"],
)
def test_scores_are_those_of_fits_made_anew(owner: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(200, len(owner), dtype=torch.float64) @ torch.randn(len(owner), len(owner), dtype=torch.float64)
    moments, weight = x.mT @ x / 200, torch.randn(5, len(owner), dtype=torch.float64)
    size = max(owner) + 1
    got = eliminate([Regression(moments.inverse(), weight, torch.tensor(owner))], size)
    np.testing.assert_allclose(got.numpy(), naively(moments.numpy(), weight.numpy(), np.array(owner), size), rtol=1e-6)
