"""Taylor and Hessian against the papers' formulas, written as a loop over positions and what goes with each."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from importance_models import MODELS, gone_with, scores, traced
from torch import Tensor, nn

import secateur as sec
from secateur.importance import Hessian, Taylor

SHAPES = {"attention": (2, 5, 8), "recurrent": (2, 5, 3), "flattened": (2, 2, 4, 4), "tied": (2, 3)}


def batches_for(name: str, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SHAPES.get(name, (2, 3, 4, 4)), generator=generator) for _ in range(count)]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sin().sum()


def naive(graph: sec.Graph, batches: list[Tensor], position_score: Callable[[list[float]], float]) -> dict[str, Tensor]:
    """For each position, the mean over batches of a function of all g·w that go with it."""
    want = {axis.name: torch.zeros(axis.size, dtype=torch.float64) for axis in graph.axes}
    for batch in batches:
        graph.model.zero_grad()
        loss(graph.model, batch).backward()
        parameters = dict(graph.model.named_parameters())
        for axis in graph.axes:
            for position in range(axis.size):
                products: list[float] = []
                for tensor, slices in gone_with(graph, axis, position).items():
                    weight, gradient = parameters[tensor].detach().double(), parameters[tensor].grad.double()
                    for dim, gone in slices:
                        for index in gone:
                            products += (weight.select(dim, index) * gradient.select(dim, index)).flatten().tolist()
                want[axis.name][position] += position_score(products) / len(batches)
    graph.model.zero_grad()
    return want


FORMULAS: dict[Any, Callable[[list[float]], float]] = {
    Taylor: lambda products: sum(products) ** 2,  # Molchanov et al. 2019, eq. 8, for a set of parameters
    Hessian: lambda products: sum(p**2 for p in products) / 2,  # LeCun et al. 1989, eq. 3, with h = g²
}


@pytest.mark.parametrize("criterion", FORMULAS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_formula(name: str, criterion: Any) -> None:
    graph, batches = traced(name), batches_for(name)
    want = naive(graph, batches, FORMULAS[criterion])
    got = scores(graph, criterion(batches, loss))
    for axis in graph.axes:
        assert want[axis.name].any()
        assert torch.allclose(got[axis.name], want[axis.name], rtol=1e-4, atol=1e-7 * want[axis.name].max()), axis.name


def by_eye() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """y = 3·(1·x) + (-1)·(2·x), no activation; two batches of one."""
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    net[0].weight.data = torch.tensor([[1.0], [2.0]])
    net[1].weight.data = torch.tensor([[3.0, -1.0]])
    return net, [(torch.tensor([[1.0]]), torch.tensor([[0.0]])), (torch.tensor([[2.0]]), torch.tensor([[1.0]]))]


def test_numbers_that_can_be_checked_by_eye() -> None:
    # Batch 1: y = 1, dL/dy = 2(y - 0) = 2. Position 0 puts 3 into y, position 1 puts -2: what makes and what reads it
    # have g·w = 2·3 = 6 each, and 2·(-2) = -4 each. Batch 2: y = 2, dL/dy = 2(y - 1) = 2; 6 and -4, so twice as much.
    net, pairs = by_eye()
    graph = sec.trace(net, pairs[0][0])
    taylor = scores(graph, Taylor(pairs, F.mse_loss))["0 features"]
    assert taylor.tolist() == [(12**2 + 24**2) / 2, (8**2 + 16**2) / 2]
    hessian = scores(graph, Hessian(pairs, F.mse_loss))["0 features"]
    assert hessian.tolist() == [(6**2 + 6**2 + 12**2 + 12**2) / 4, (4**2 + 4**2 + 8**2 + 8**2) / 4]


def test_taylor_is_what_the_loss_changes_by_when_a_position_fades() -> None:
    """The definition: scale all that goes with a position by 1 - ε; the loss changes by -ε·Σ g·w."""
    graph = traced("residual")
    (batch,) = batches_for("residual", 1)
    got = scores(graph, Taylor([batch], loss))["a channels"]
    (axis,) = graph.axes
    precise = copy.deepcopy(graph.model).double()

    def faded(position: int, epsilon: float) -> float:
        model = copy.deepcopy(precise)
        with torch.no_grad():
            for name, slices in gone_with(graph, axis, position).items():
                for dim, gone in slices:
                    model.get_parameter(name).movedim(dim, 0)[gone] *= 1 - epsilon
            return loss(model, batch.double()).item()

    for position in range(axis.size):
        change = (faded(position, 1e-5) - faded(position, -1e-5)) / 2e-5
        assert change**2 == pytest.approx(got[position].item(), rel=1e-3)


def test_every_batch_counts_the_same_and_their_order_does_not() -> None:
    graph, batches = traced("residual"), batches_for("residual")
    for criterion in (Taylor, Hessian):
        alone = [scores(graph, criterion([batch], loss))["a channels"] for batch in batches]
        together = scores(graph, criterion(batches[::-1], loss))["a channels"]
        assert torch.allclose(together, torch.stack(alone).mean(0), rtol=1e-9)
        assert not torch.allclose(together, alone[0], rtol=0.01)
        assert not torch.allclose(together, alone[-1], rtol=0.01)


@pytest.mark.parametrize(
    "given",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        functools.partial(F.cross_entropy, reduction="mean"),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    ],
    ids=["function", "module", "partial", "own"],
)
def test_losses_of_torch_take_pairs(given: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    pairs = [(torch.randn(5, 3), torch.randint(2, (5,))) for _ in range(2)]
    graph = sec.trace(net, pairs[0][0])
    got = scores(graph, Taylor(pairs, given))["0 features"]
    want = scores(graph, Taylor(pairs, lambda model, pair: F.cross_entropy(model(pair[0]), pair[1])))["0 features"]
    assert torch.equal(got, want)
    assert got.any()


def test_inputs_of_a_pair_are_an_example() -> None:
    net = nn.Bilinear(3, 4, 5)
    model = nn.ModuleDict({"two": net, "out": nn.Linear(5, 1)})
    model.forward = lambda x, y: model["out"](model["two"](x, y))  # type: ignore[method-assign]
    x, y = torch.randn(6, 3), torch.randn(6, 4)
    graph = sec.trace(model, (x, y))
    (axis,) = graph.axes
    as_args = scores(graph, Taylor([((x, y), torch.zeros(6, 1))], F.mse_loss))[axis.name]
    as_names = scores(graph, Taylor([({"x": x, "y": y}, torch.zeros(6, 1))], nn.MSELoss()))[axis.name]
    assert as_args.any()
    assert torch.equal(as_args, as_names)


def test_the_data_are_read_once_for_all_axes_of_a_plan() -> None:
    read = []

    def batches() -> Any:
        for batch in batches_for("concat"):
            read.append(len(batch))
            yield batch

    graph = traced("concat")
    assert len(graph.axes) == 2
    sec.plan(graph, sec.Ratio(0.5), importance=Taylor(batches, loss))
    assert len(read) == 3
    sec.plan(graph, sec.Ratio(0.5), importance=Taylor(batches, loss))
    assert len(read) == 6  # a function is called anew for each plan


@pytest.mark.parametrize("criterion", FORMULAS, ids=lambda c: c.__name__)
def test_sparse_gradients_are_summed_like_others(criterion: Any) -> None:
    tokens = torch.tensor([[1, 2, 2], [5, 0, 1]])
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Linear(4, 2))
        found.append(scores(sec.trace(net, tokens), criterion([tokens], loss))["0 features"])
    assert found[0].any()
    assert torch.allclose(found[1], found[0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    graph, batches = traced("flattened"), batches_for("flattened")
    want = scores(graph, Taylor(batches, loss))["conv channels"]
    graph = sec.trace(graph.model.to(dtype), graph.example.to(dtype))
    got = scores(graph, Taylor([batch.to(dtype) for batch in batches], loss))["conv channels"]
    assert torch.allclose(got, want, rtol=0.3 if dtype == torch.bfloat16 else 1e-4, atol=0.05 * want.max())


def test_a_position_that_the_loss_does_not_depend_on_scores_zero() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    net[2].weight.data[:, 1] = 0.0
    net[0].weight.data[1] = 0.0
    graph = sec.trace(net, torch.zeros(1, 3))
    for criterion in (Taylor, Hessian):
        got = scores(graph, criterion([torch.randn(8, 3)], loss))["0 features"]
        assert got[1] == 0
        assert (got > 0).sum() >= 2
