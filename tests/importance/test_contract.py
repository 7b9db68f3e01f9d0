"""What holds for every criterion."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import pytest
import torch
from importance_models import MODELS, scores, traced
from test_gradient_criteria import batches_for, loss
from torch import Tensor

import secateur as sec
from secateur import importance
from secateur.importance import Criterion, Weights


def every(batches: list[Tensor]) -> dict[str, Criterion]:
    return {
        "Activation": importance.Activation(batches),
        "BNScale": importance.BNScale(),
        "FPGM": importance.FPGM(),
        "Hessian": importance.Hessian(batches, loss),
        "LAMP": importance.LAMP(),
        "Magnitude": importance.Magnitude(),
        "Random": importance.Random(0),
        "Reconstruction": importance.Reconstruction(batches),
        "Sum": 2 * importance.Magnitude() + importance.Taylor(batches, loss),
        "Taylor": importance.Taylor(batches, loss),
        "Wanda": importance.Wanda(batches),
    }


NAMES = sorted(every([]))


def test_all_of_them_are_here() -> None:
    found = {n: getattr(importance, n) for n in importance.__all__}
    public = {n for n, thing in found.items() if inspect.isclass(thing) and issubclass(thing, Criterion)}
    assert public - {"Criterion", "JointCriterion"} - set(NAMES) == set()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_value_that_cannot_be_changed(name: str) -> None:
    criterion = every([])[name]
    assert dataclasses.is_dataclass(criterion)
    assert hash(criterion) == hash(criterion)
    with pytest.raises(AttributeError):
        criterion.other = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_one_finite_score_per_position_the_same_each_time(name: str, model: str) -> None:
    graph = traced(model)
    criterion = every(batches_for(model))[name]
    one, two = scores(graph, criterion), scores(graph, criterion)
    for axis in graph.axes:
        assert one[axis.name].shape == (axis.size,)
        assert one[axis.name].isfinite().all()
        assert one[axis.name].min() >= 0
        assert one[axis.name].std() > 0 or axis.size == 2, "all positions the same"  # two are as far from each other
        assert torch.equal(one[axis.name], two[axis.name])


def shuffled(graph: sec.Graph, axis: sec.Axis, order: Tensor) -> sec.Graph:
    """The same function with the positions of one axis in another order."""
    owners = Weights(graph, graph.axes).context(axis).owners
    model = copy.deepcopy(graph.model)
    done = set()
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    with torch.no_grad():
        for site in axis.sites:
            tensor = tensors[site.tensor]
            if (id(tensor), site.dim) in done:
                continue
            done.add((id(tensor), site.dim))
            index = torch.arange(tensor.shape[site.dim])
            for owner in owners(site.tensor, site.dim):
                mine = owner.argsort(stable=True)[int((owner < 0).sum()) :].reshape(axis.size, -1)
                index[mine] = mine[order]
            tensor.copy_(tensor.index_select(site.dim, index))
    assert torch.allclose(model(graph.example), graph.model(graph.example), atol=1e-5)
    return sec.trace(model, graph.example)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "Random"])
def test_scores_follow_their_positions(name: str, model: str) -> None:
    graph = traced(model)
    criterion = every(batches_for(model))[name]
    want = scores(graph, criterion)
    for axis in graph.axes:
        order = torch.randperm(axis.size, generator=torch.Generator().manual_seed(axis.size))
        got = scores(shuffled(graph, axis, order), criterion)
        assert torch.allclose(got[axis.name], want[axis.name][order], rtol=1e-3, atol=1e-4 * want[axis.name].max())
        for other in graph.axes:
            if other is not axis:
                assert torch.allclose(got[other.name], want[other.name], rtol=1e-3, atol=1e-4 * want[other.name].max())


def test_criteria_can_be_planned_with() -> None:
    graph = traced("residual")
    kept: dict[str, Any] = {}
    for name, criterion in every(batches_for("residual")).items():
        (axis,) = sec.plan(graph, sec.Ratio(0.5), importance=criterion).axes
        best = scores(graph, criterion)[axis.name].topk(3).indices.sort().values
        assert axis.keep == tuple(best.tolist())
        kept[name] = axis.keep
    assert len(set(kept.values())) > 2  # they do not all say the same
