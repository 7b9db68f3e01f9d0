"""Every method on problems so small that all masks can be tried, and each against its paper's own formula."""

from collections.abc import Iterator
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from secateur.sparse.admm import ADMM, on_support
from secateur.sparse.magnitude import magnitude
from secateur.sparse.patterns import NM, Block, Pattern, Unstructured
from secateur.sparse.problem import Method, Problem
from secateur.sparse.ria import RIA
from secateur.sparse.sparsegpt import SparseGPT
from secateur.sparse.wanda import wanda

METHODS: tuple[Method, ...] = (magnitude, wanda, RIA(), SparseGPT(), ADMM(), ADMM(dense=False))
METHOD_NAMES = tuple(getattr(method, "__name__", str(method)) for method in METHODS)
PATTERNS = (Unstructured(0.5), NM(2, 4), NM(4, 8), Block(2, 1), Block(1, 4))


def _problem(seed: int, outputs: int = 2, inputs: int = 8, rows: int = 60) -> Problem:
    """Inputs that vary together, as those of real layers do."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=generator) + torch.eye(inputs)
    x = torch.randn(rows, inputs, generator=generator) @ mix
    return Problem.of(torch.randn(outputs, inputs, generator=generator), x)


def _masks(pattern: Pattern, inputs: int) -> Iterator[Tensor]:
    """Every mask of one row that the pattern allows."""
    if isinstance(pattern, NM):
        groups = [list(combinations(range(g, g + pattern.m), pattern.n)) for g in range(0, inputs, pattern.m)]
        chosen = [sum(parts, ()) for parts in product(*groups)]
    else:
        chosen = list(combinations(range(inputs), inputs - round(pattern.sparsity * inputs)))
    for each in chosen:
        mask = torch.zeros(inputs, dtype=torch.bool)
        mask[list(each)] = True
        yield mask


def _least(problem: Problem, pattern: Pattern) -> float:
    """The least error of one row with any mask of the pattern, by solving for each."""
    xx, yx, best = problem.xx[0].double(), problem.yx[0, 0].double(), float("inf")
    for mask in _masks(pattern, len(yx)):
        row = torch.zeros_like(yx)
        row[mask] = torch.linalg.solve(xx[mask][:, mask], yx[mask])
        best = min(best, problem.error(row.view(1, 1, -1)))
    return best


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=METHOD_NAMES)
def test_what_comes_out_has_the_pattern(method: Method, pattern: Pattern) -> None:
    problem = _problem(0, outputs=4, inputs=16)
    weight = method(problem, pattern)
    assert weight.shape == problem.weight.shape
    assert weight.isfinite().all()
    assert int((weight == 0).sum()) == 32
    rule = pattern.mask((weight[0] != 0).float())  # a mask of the pattern that keeps all that is not zero
    assert not (weight[0][~rule]).any()


@pytest.mark.parametrize("method", METHODS, ids=METHOD_NAMES)
def test_zeros_stay_zeros(method: Method) -> None:
    problem = _problem(1, outputs=4, inputs=16)
    weight = problem.weight.clone()
    weight[0, :, ::4] = 0
    given = Problem(weight, problem.xx, weight @ problem.xx, weight != 0, problem.price)
    sparse = method(given, Unstructured(0.5))
    assert not sparse[..., ::4].any()
    assert int((sparse == 0).sum()) == 32  # those that were there count


@pytest.mark.parametrize("pattern", [Unstructured(0.5), NM(2, 4), NM(4, 8)], ids=str)
def test_admm_is_near_the_best_of_all_masks_and_ahead_of_the_others(pattern: Pattern) -> None:
    total = dict.fromkeys(("best", "admm", "sparsegpt", "wanda", "magnitude"), 0.0)
    for seed in range(20):
        problem = _problem(seed, outputs=1)
        least = _least(problem, pattern)
        total["best"] += least
        for name, method in (
            ("admm", ADMM(ridge=1e-6, growth=1.5, rounds=12, steps=3)),  # slowly: it ends nearer to the best
            ("sparsegpt", SparseGPT(ridge=1e-6)),
            ("wanda", wanda),
            ("magnitude", magnitude),
        ):
            error = problem.error(method(problem, pattern))
            assert error >= least * (1 - 1e-3) - 1e-6
            total[name] += error
    assert total["best"] <= total["admm"] < 1.25 * total["best"]
    assert total["admm"] < total["sparsegpt"] < total["wanda"]


def test_sparsegpt_is_the_exact_elimination_of_one_weight_after_the_other() -> None:
    """With all zeros in the first column, its update is the optimal brain surgeon's: the exact least squares."""
    problem = _problem(3, outputs=1, inputs=6)
    mask = torch.ones(1, 1, 6, dtype=torch.bool)
    mask[..., 0] = False
    scored = Problem(torch.where(mask, problem.weight, problem.weight * 1e-3), *_moments(problem, 1e-3))
    sparse = SparseGPT(ridge=1e-9)(scored, Unstructured(1 / 6))
    exact = torch.linalg.solve(scored.xx[0, 1:, 1:].double(), scored.yx[0, 0, 1:].double())
    assert sparse[0, 0, 0] == 0
    assert torch.allclose(sparse[0, 0, 1:].double(), exact, rtol=1e-3, atol=1e-4)


def _moments(problem: Problem, small: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight = problem.weight.clone()
    weight[..., 0] *= small
    return problem.xx, weight @ problem.xx, weight != 0, problem.price


def _algorithm_of_the_paper(problem: Problem, pattern: Pattern, columns: int, ridge: float) -> Tensor:
    """SparseGPT's algorithm for one group in double precision, with an inverse of its own for every column."""
    weight, xx = problem.weight[0].double(), problem.xx[0].double()
    xx = xx + ridge * xx.diagonal().mean() * torch.eye(len(xx))
    mask = torch.ones_like(weight, dtype=torch.bool)
    at_a_time = pattern.m if isinstance(pattern, NM) else columns
    for j in range(len(xx)):
        if j % at_a_time == 0:
            these = range(j, min(j + at_a_time, len(xx)))
            left = torch.stack([torch.linalg.inv(xx[i:, i:])[0, 0] for i in these])  # [H⁻¹] of the columns from i on
            mask[:, list(these)] = pattern.mask(weight[:, list(these)].square() / left)
        inverse = torch.linalg.inv(xx[j:, j:])
        error = torch.where(mask[:, j], 0, weight[:, j]) / inverse[0, 0]
        weight[:, j:] -= error.unsqueeze(1) * inverse[0]
    return torch.where(mask, weight, 0)


@pytest.mark.parametrize("pattern", [Unstructured(0.5), Unstructured(0.75), NM(2, 4), NM(4, 8)], ids=str)
def test_sparsegpt_is_the_algorithm_of_its_paper(pattern: Pattern) -> None:
    for seed in range(5):
        problem = _problem(seed, outputs=5, inputs=24)
        for columns in (8, 16, 128):
            sparse = SparseGPT(columns=columns)(problem, pattern)[0].double()
            exact = _algorithm_of_the_paper(problem, pattern, columns, 0.01)
            assert torch.equal(sparse != 0, exact != 0)
            assert torch.allclose(sparse, exact, rtol=1e-3, atol=1e-3)


def test_sparsegpt_updates_only_columns_that_follow() -> None:
    problem = _problem(4, outputs=3, inputs=8)
    sparse = SparseGPT()(problem, NM(2, 4))
    first = (sparse == 0)[0].float().argmax(1)  # of each row
    for row, at in enumerate(first):
        assert torch.equal(sparse[0, row, :at], problem.weight[0, row, :at])


def test_wanda_compares_within_rows_and_magnitude_over_all() -> None:
    weight = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])
    x = torch.diag(torch.tensor([8.0, 1.0, 1.0, 1.0]))
    problem = Problem.of(weight, x)
    assert (wanda(problem, Unstructured(0.5))[0] != 0).tolist() == [[True, False, False, True]] * 2
    assert (magnitude(problem, Unstructured(0.5))[0] != 0).tolist() == [[False] * 4, [True] * 4]


@pytest.mark.parametrize("pattern", [Unstructured(0.5), NM(2, 4), NM(4, 8)], ids=str)
def test_wanda_is_the_papers_formula(pattern: Pattern) -> None:
    """|W|·‖X‖₂, and of each output's row the half with the lowest goes, or two of every four."""
    x = torch.randn(30, 16, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 17)
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    kept = wanda(Problem.of(weight, x), pattern)[0]
    scores = weight.abs() * x.norm(dim=0)
    group = pattern.m if isinstance(pattern, NM) else 16
    for row in range(6):
        for start in range(0, 16, group):
            these = range(start, start + group)
            best = sorted(these, key=lambda i: float(scores[row, i]), reverse=True)[: group // 2]
            assert {i for i in these if kept[row, i] != 0} == set(best)
            assert torch.equal(kept[row, best], weight[row, best])


def test_ria_is_the_papers_formula() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    x = torch.diag(torch.tensor([4.0, 1.0]))
    norms = x.square().mean(0).sqrt()
    scores = torch.tensor(
        [
            [(1 / 3 + 1 / 4) * norms[0] ** 0.5, (2 / 3 + 2 / 7) * norms[1] ** 0.5],
            [(3 / 8 + 3 / 4) * norms[0] ** 0.5, (5 / 8 + 5 / 7) * norms[1] ** 0.5],
        ]
    )
    kept = RIA()(Problem.of(weight, x), Unstructured(0.25))[0] != 0
    assert torch.equal(kept, scores > scores.min())


def test_weights_on_a_support_are_those_of_a_direct_solution() -> None:
    problem = _problem(5, outputs=3, inputs=8)
    mask = torch.rand(1, 3, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    fitted = on_support(problem.xx.double(), problem.yx.double(), mask, torch.zeros(1, 3, 8).double(), 20)
    for row in range(3):
        m = mask[0, row]
        exact = torch.linalg.solve(problem.xx[0][m][:, m].double(), problem.yx[0, row, m].double())
        assert torch.allclose(fitted[0, row, m], exact, atol=1e-6)
        assert not fitted[0, row, ~m].any()


def test_admm_makes_up_for_inputs_that_are_off() -> None:
    """Inputs twice as large as in the dense model: towards its outputs, the weights have to be half as large."""
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(6))
    weight = torch.randn(2, 8, generator=torch.Generator().manual_seed(7))
    problem = Problem.of(weight, 2 * x, y=x @ weight.T)
    towards, own = (ADMM(ridge=1e-6, dense=dense)(problem, Unstructured(0.5)) for dense in (True, False))
    assert torch.allclose(towards, own / 2, atol=1e-3)


def test_outputs_with_a_higher_price_keep_more() -> None:
    problem = _problem(8, outputs=2, inputs=8)
    dear = Problem(problem.weight, problem.xx, problem.yx, problem.free, torch.tensor([[1.0, 1e6]]))
    kept = (ADMM()(dear, Unstructured(0.5)) != 0).sum(-1)
    assert kept[0, 1] == 8
    assert kept[0, 0] == 0


@pytest.mark.parametrize("method", METHODS, ids=METHOD_NAMES)
def test_groups_are_solved_each_with_its_own_inputs(method: Method) -> None:
    one, two = _problem(9, inputs=8), _problem(10, inputs=8)
    fields = ("weight", "xx", "yx", "free", "price")
    both = Problem(*(torch.cat([getattr(p, name) for p in (one, two)]) for name in fields), rows=one.rows)
    apart = torch.cat([method(p, NM(2, 4)) for p in (one, two)])
    assert torch.allclose(method(both, NM(2, 4)), apart, atol=1e-5)


@pytest.mark.parametrize("method", METHODS, ids=METHOD_NAMES)
def test_an_input_that_is_always_zero(method: Method) -> None:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(11))
    x[:, 3] = 0
    problem = Problem.of(torch.randn(2, 8, generator=torch.Generator().manual_seed(12)), x)
    weight = method(problem, Unstructured(0.5))
    assert weight.isfinite().all()
    assert int((weight == 0).sum()) >= 8
