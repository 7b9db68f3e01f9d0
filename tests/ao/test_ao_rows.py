import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao.pruning._experimental import pruner as original

from secateur import ao
from secateur.ao import fpgm
from secateur.ao.fpgm import distance_sums
from secateur.ao.rows import keep_salient
from secateur.errors import SecateurError

LAYERS = [
    nn.Linear(6, 10),
    nn.Conv1d(3, 10, 2),
    nn.Conv2d(3, 10, 3),
    nn.Conv2d(4, 10, 3, groups=2, bias=False),
    nn.Conv3d(2, 10, 2),
]


def row_mask(model: nn.Module) -> torch.Tensor:
    return model[0].parametrizations.weight[0].mask


# -- the rule -----------------------------------------------------------------------------------------------


def test_the_least_salient_go_line_by_line() -> None:
    saliency = torch.tensor([[3.0, 1.0, 2.0], [5.0, 6.0, 4.0]])
    keep = keep_salient(saliency, torch.ones(2, 3, dtype=torch.bool), drop=2)
    assert torch.equal(keep, torch.tensor([[True, False, False], [False, True, False]]))


def test_what_is_gone_goes_first_and_the_most_salient_comes_back_first() -> None:
    saliency = torch.tensor([[9.0, 1.0, 2.0, 8.0]])
    kept = torch.tensor([[False, True, True, False]])
    results = {drop: keep_salient(saliency, kept, drop)[0].tolist() for drop in range(5)}
    assert results == {
        0: [True, True, True, True],
        1: [True, True, True, False],
        2: [False, True, True, False],
        3: [False, False, True, False],
        4: [False, False, False, False],
    }


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12, unique=True), st.data())
def test_masks_are_nested_in_the_level(values: list[int], data: st.DataObject) -> None:
    saliency = torch.tensor([values], dtype=torch.float32)
    keep = torch.ones_like(saliency, dtype=torch.bool)
    for drop in data.draw(st.lists(st.integers(0, len(values)), min_size=1, max_size=4)):
        before, keep = keep, keep_salient(saliency, keep, drop)
        assert int((~keep).sum()) == drop
        assert (keep <= before).all() or (keep >= before).all()
        assert torch.equal(keep, keep_salient(saliency, torch.ones_like(keep), drop))  # as from the start


# -- saliency -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("level", [0, 0.05, 0.29, 0.5, 0.99, 1.0])
def test_saliency_pruner_masks_as_the_original(layer: nn.Module, level: float) -> None:
    ours, theirs = nn.Sequential(copy.deepcopy(layer)), nn.Sequential(copy.deepcopy(layer))
    mine, his = (
        ao.SaliencyPruner({"sparsity_level": level}),
        original.SaliencyPruner({"sparsity_level": level}),
    )
    for sparsifier, model in ((mine, ours), (his, theirs)):
        sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
        sparsifier.step()
    assert torch.equal(row_mask(ours), row_mask(theirs))
    assert int((~row_mask(ours)).sum()) == int(10 * level)


def test_saliency_pruner_follows_the_original_while_weights_train_and_the_level_rises() -> None:
    ours, theirs = nn.Sequential(nn.Linear(6, 20)), nn.Sequential(nn.Linear(6, 20))
    mine, his = ao.SaliencyPruner({"sparsity_level": 0.0}), original.SaliencyPruner({"sparsity_level": 0.0})
    for sparsifier, model in ((mine, ours), (his, theirs)):
        sparsifier.prepare(model, None)
    for level in (0.1, 0.3, 0.3, 0.8):
        weight = torch.randn(20, 6)
        for sparsifier, model in ((mine, ours), (his, theirs)):
            model[0].parametrizations.weight.original.data.copy_(weight)
            sparsifier.groups[0]["sparsity_level"] = level
            sparsifier.step()
        assert torch.equal(row_mask(ours), row_mask(theirs))


def test_equal_rows_go_as_with_the_original() -> None:
    results = []
    for package in (ao, original):
        model = nn.Sequential(nn.Linear(3, 9))
        nn.init.ones_(model[0].weight)
        pruner = package.SaliencyPruner({"sparsity_level": 0.5})
        pruner.prepare(model, None)
        pruner.step()
        results.append(row_mask(model).tolist())
    assert results[0] == results[1]


@pytest.mark.parametrize("pruner", [ao.SaliencyPruner({}), ao.FPGMPruner()], ids=lambda p: type(p).__name__)
def test_masks_follow_the_level_down(pruner: ao.BaseStructuredSparsifier) -> None:
    pruner, model = copy.deepcopy(pruner), nn.Sequential(nn.Conv2d(2, 20, 3))
    pruner.prepare(model, None)
    bias, seen = model[0]._bias.detach().clone(), []
    for level in (0.2, 0.8, 0.2, 1.0, 0.5, 0.0):
        pruner.groups[0]["sparsity_level"] = level
        pruner.step()
        model(torch.ones(1, 2, 3, 3))
        seen.append(row_mask(model).clone())
        assert int((~seen[-1]).sum()) == round(level * 20)
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(model[0]._bias, bias)


# -- geometric median ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("dist", [None, 1, 2, lambda x: torch.cdist(x, x, p=math.inf)])
@pytest.mark.parametrize("level", [-0.5, 0.0, 0.05, 0.35, 0.5, 0.96, 1.0, 3])
def test_fpgm_masks_as_the_original(layer: nn.Module, dist: Any, level: float) -> None:
    ours, theirs = nn.Sequential(copy.deepcopy(layer)), nn.Sequential(copy.deepcopy(layer))
    for package, model in ((ao, ours), (original, theirs)):
        if package is original and not isinstance(layer, nn.Linear | nn.Conv2d):
            # The original has bias hooks for these two only, but knows how to measure the others.
            model[0].bias = None
        pruner = package.FPGMPruner(level, dist)
        pruner.prepare(model, [{"tensor_fqn": "0.weight"}])
        pruner.step()
    assert torch.equal(row_mask(ours), row_mask(theirs))


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("shape", [(1, 4), (26, 3), (70, 200), (64, 5)])
def test_distance_sums_do_not_depend_on_the_chunks(
    p: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(shape)
    exact = torch.cdist(rows.double(), rows.double(), p=p, compute_mode="donot_use_mm_for_euclid_dist").sum(1)
    for chunk in (1, 7, 32, 64, 1000):
        monkeypatch.setattr(fpgm, "_CHUNK", chunk)
        torch.testing.assert_close(distance_sums(rows, p).double(), exact, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(distance_sums(rows.double(), p), exact)


def test_fpgm_takes_the_one_in_the_middle_not_the_smallest() -> None:
    model = nn.Sequential(nn.Linear(1, 4))
    model[0].weight.data = torch.tensor([[6.0], [7.0], [0.4], [0.5]])
    pruner = ao.FPGMPruner(0.5)
    pruner.prepare(model)
    pruner.step()
    assert row_mask(model).tolist() == [False, True, True, False]


def test_fpgm_on_a_wide_layer_agrees_with_the_original() -> None:
    model = nn.Sequential(nn.Conv2d(16, 700, 3, bias=False))
    twin = copy.deepcopy(model)
    for package, each in ((ao, model), (original, twin)):
        pruner = package.FPGMPruner(0.4)
        pruner.prepare(each, None)
        pruner.step()
    assert torch.equal(row_mask(model), row_mask(twin))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_fpgm_on_other_precisions(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 8, bias=False)).to(dtype)
    pruner = ao.FPGMPruner(0.25)
    pruner.prepare(model)
    pruner.step()
    assert int(row_mask(model).sum()) == 6


@pytest.mark.parametrize("dist", [0, 3, "l2"])
def test_fpgm_refuses_distances_it_does_not_know(dist: Any) -> None:
    with pytest.raises(NotImplementedError, match="distance") as caught:
        ao.FPGMPruner(0.5, dist)
    assert isinstance(caught.value, SecateurError)


# -- bad input ----------------------------------------------------------------------------------------------

PRUNERS = [ao.SaliencyPruner({}), ao.FPGMPruner(), ao.LSTMSaliencyPruner({}), ao.GRUSaliencyPruner({})]


@pytest.mark.parametrize("pruner", PRUNERS, ids=lambda p: type(p).__name__)
def test_vectors_have_no_rows(pruner: ao.BaseStructuredSparsifier, unchanged: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12))
    for name in ("1.weight", "0.bias"):
        with unchanged(model), pytest.raises(SecateurError, match=rf"{name}.*2 or more dims"):
            copy.deepcopy(pruner).prepare(
                model, [{"tensor_fqn": "0.weight", "sparsity_level": 0.5}, {"tensor_fqn": name}]
            )


@pytest.mark.parametrize("pruner", PRUNERS, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("level", ["0.5", None, math.nan, [0.5], True, 1j])
def test_a_level_that_is_no_number(pruner: ao.BaseStructuredSparsifier, level: Any, unchanged: Any) -> None:
    pruner, model = copy.deepcopy(pruner), nn.Sequential(nn.Linear(4, 12))
    config = [{"tensor_fqn": "0.weight", "sparsity_level": level}]
    with unchanged(model), pytest.raises(SecateurError, match=r"0\.weight.*level"):
        pruner.prepare(model, config)
    pruner.prepare(model, [{"tensor_fqn": "0.weight", "sparsity_level": 0.25}])
    pruner.groups[0]["sparsity_level"] = level
    with unchanged(model), pytest.raises(SecateurError, match=r"0\.weight.*level"):
        pruner.step()


@pytest.mark.parametrize("pruner", [PRUNERS[0], *PRUNERS[2:]], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("level", [-0.1, 1.01, math.inf])
def test_a_level_outside_where_it_has_no_meaning(
    pruner: ao.BaseStructuredSparsifier, level: float, unchanged: Any
) -> None:
    model = nn.Sequential(nn.Linear(4, 12))
    with unchanged(model), pytest.raises(ValueError, match=r"0\.weight.*from 0 to 1") as caught:
        copy.deepcopy(pruner).prepare(model, [{"tensor_fqn": "0.weight", "sparsity_level": level}])
    assert isinstance(caught.value, SecateurError)


def test_a_missing_level_is_an_error_at_the_step(unchanged: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pruner = ao.SaliencyPruner({})
    pruner.prepare(model, [{"tensor_fqn": "0.weight", "sparsity_level": 0.5}, {"tensor_fqn": "1.weight"}])
    with unchanged(model), pytest.raises(KeyError, match=r"1\.weight: no 'sparsity_level'") as caught:
        pruner.step()
    assert isinstance(caught.value, SecateurError)


def test_a_weight_that_grew_since_prepare_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    pruner = ao.SaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(model)
    model[0].parametrizations.weight.original = nn.Parameter(torch.randn(6, 4))
    with pytest.raises(SecateurError, match=r"0\.weight: 6 rows.*4"):
        pruner.step()


def test_saliency_sees_other_parametrizations_but_not_the_mask() -> None:
    class Flip(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flip(0)

    model = nn.Sequential(nn.Linear(1, 3, bias=False))
    model[0].weight.data = torch.tensor([[1.0], [2.0], [3.0]])
    nn.utils.parametrize.register_parametrization(model[0], "weight", Flip())
    pruner = ao.SaliencyPruner({"sparsity_level": 0.34})
    pruner.prepare(model, [{"tensor_fqn": "0.weight"}])
    pruner.step()
    mask = model[0].parametrizations.weight[1].mask
    assert mask.tolist() == [True, True, False]
    assert torch.equal(model[0].weight.flatten(), torch.tensor([3.0, 2.0, 0.0]))


def test_saliency_under_weight_norm() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))
    dense = model[0].weight.detach().clone()
    pruner = ao.SaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(model, [{"tensor_fqn": "0.weight"}])
    pruner.step()
    expected = dense.abs().sum(1) >= dense.abs().sum(1).median().nextafter(torch.tensor(9.0))
    assert torch.equal((model[0].weight != 0).all(1), expected)
