"""Patterns: each mask obeys its rule, keeps the largest scores, and refuses what cannot be."""

from itertools import combinations

import pytest
import torch

from secateur.errors import PlanError
from secateur.sparse.patterns import NM, Block, Pattern, Unstructured

PATTERNS = (
    Unstructured(0.5),
    Unstructured(0.3),
    Unstructured(0.0),
    NM(2, 4),
    NM(4, 8),
    NM(1, 4),
    Block(4, 1),
    Block(2, 4, 0.25),
)


@pytest.fixture
def scores() -> torch.Tensor:
    return torch.rand(8, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_fraction_of_zeros_is_exact(pattern: Pattern, scores: torch.Tensor) -> None:
    assert float((~pattern.mask(scores)).double().mean()) == pytest.approx(pattern.sparsity, abs=1 / scores.numel())


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_inputs_in_another_dimension(pattern: Pattern, scores: torch.Tensor) -> None:
    assert torch.equal(pattern.mask(scores.t().contiguous(), dim=0).t(), pattern.mask(scores))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_convolutions_have_the_pattern_at_each_place_of_the_kernel(pattern: Pattern) -> None:
    scores = torch.rand(8, 16, 3, 3, generator=torch.Generator().manual_seed(1))
    mask = pattern.mask(scores)
    assert mask.shape == scores.shape
    if isinstance(pattern, NM):
        assert (mask.unflatten(1, (-1, pattern.m)).sum(2) == pattern.n).all()
    if isinstance(pattern, Block):
        tiles = mask.unflatten(0, (-1, pattern.height)).unflatten(2, (-1, pattern.width))
        assert (tiles.amax((1, 3)) == tiles.amin((1, 3))).all()


@pytest.mark.parametrize("pattern", [Unstructured(0.5), NM(2, 4), Block(1, 2)], ids=str)
def test_no_other_choice_keeps_more(pattern: Pattern) -> None:
    scores = torch.rand(1, 8, generator=torch.Generator().manual_seed(2))
    kept = float(scores[pattern.mask(scores)].sum())
    best = 0.0
    for chosen in combinations(range(8), 4):
        mask = torch.zeros(8)
        mask[list(chosen)] = 1
        legal = {
            Unstructured: True,
            NM: bool((mask.view(2, 4).sum(1) == 2).all()),
            Block: bool((mask.view(4, 2)[:, 0] == mask.view(4, 2)[:, 1]).all()),
        }[type(pattern)]
        best = max(best, float((scores * mask).sum())) if legal else best
    assert kept == pytest.approx(best)


def test_of_equal_scores_the_first_go() -> None:
    ones = torch.ones(1, 4)
    for pattern in (Unstructured(0.5), NM(2, 4), Block(1, 2)):
        assert pattern.mask(ones).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Unstructured(1.0), "fraction of zeros"),
        (lambda: Unstructured(-0.1), "fraction of zeros"),
        (lambda: Unstructured(float("nan")), "fraction of zeros"),
        (lambda: Unstructured("0.5"), "fraction of zeros"),  # type: ignore[arg-type]
        (lambda: Unstructured(True), "fraction of zeros"),
        (lambda: NM(5, 4), "n is at most m"),
        (lambda: NM(0, 4), "from 1 on"),
        (lambda: NM(2.0, 4), "whole number"),  # type: ignore[arg-type]
        (lambda: Block(0, 1), "height"),
        (lambda: Block(4, 1, 1.5), "fraction of zeros"),
        (lambda: NM(2, 4).mask(torch.ones(3, 6)), "6 inputs are no multiple of 4"),
        (lambda: NM(2, 4).mask(torch.ones(8)), "1 dimension"),
        (lambda: Block(4, 1).mask(torch.ones(6, 4)), "6×4 is not made of blocks of 4×1"),
    ],
)
def test_what_cannot_be_is_refused(make: object, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make()  # type: ignore[operator]
