import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao import pruning as original

from secateur import ao
from secateur.errors import SecateurError


def masks(package: Any, weight: torch.Tensor, steps: int = 1, **options: Any) -> torch.Tensor:
    layer = nn.Linear(*reversed(weight.shape), bias=False)
    layer.weight.data = weight.clone()
    sparsifier = package.WeightNormSparsifier(**options)
    sparsifier.prepare(nn.Sequential(layer), None)
    for _ in range(steps):
        sparsifier.step()
    return layer.parametrizations.weight[0].mask


def by_hand(weight: torch.Tensor, level: float, block: tuple[int, int], zeros: int) -> torch.Tensor:
    """The definition, block by block."""
    keep = torch.ones_like(weight)
    corners = list(itertools.product(range(0, weight.shape[0], block[0]), range(0, weight.shape[1], block[1])))
    tiles = [(slice(i, i + block[0]), slice(j, j + block[1])) for i, j in corners]
    count = len(tiles) if level >= 1 else min(max(round(level * len(tiles)), 0), len(tiles) - 1)
    for tile in sorted(tiles, key=lambda tile: weight[tile].square().mean().item())[:count]:
        smallest = weight[tile].abs().flatten().argsort()[:zeros]
        flat = torch.ones(weight[tile].numel())
        flat[smallest] = 0
        keep[tile] = flat.view(weight[tile].shape)
    return keep


@pytest.mark.parametrize("level", [-1.0, 0.0, 0.3, 0.5, 0.99, 1.0, 2.0])
@pytest.mark.parametrize("block", [(1, 1), (1, 4), (2, 2), (4, 1), (3, 2)])
def test_same_masks_as_the_original(level: float, block: tuple[int, int]) -> None:
    weight = torch.randn(12, 24)
    for zeros in (None, *range(math.prod(block) + 1)):
        for norm in (None, 1, 2, torch.abs):
            options: dict[str, Any] = {
                "sparsity_level": level,
                "sparse_block_shape": block,
                "zeros_per_block": zeros,
                "norm": norm,
            }
            assert torch.equal(masks(ao, weight, **options), masks(original, weight, **options).float()), options


@pytest.mark.parametrize("shape", [(7, 9), (1, 3), (5, 4), (2, 1)])
@pytest.mark.parametrize("block", [(1, 4), (4, 1), (2, 3), (4, 4)])
@pytest.mark.parametrize("level", [0.2, 0.5, 0.8])
def test_whole_blocks_over_the_edge_are_those_of_the_original(
    shape: tuple[int, int], block: tuple[int, int], level: float
) -> None:
    weight = torch.randn(shape)
    options: dict[str, Any] = {"sparsity_level": level, "sparse_block_shape": block}
    assert torch.equal(masks(ao, weight, **options), masks(original, weight, **options))


def test_equal_weights_lose_as_many_as_the_original_takes_and_the_same() -> None:
    for zeros in (4, 2):
        options: dict[str, Any] = {
            "sparsity_level": 0.5,
            "sparse_block_shape": (2, 2),
            "zeros_per_block": zeros,
        }
        ours, theirs = (masks(package, torch.ones(12, 12), **options) for package in (ao, original))
        assert ours.mean() == 1 - 0.5 * zeros / 4
        assert torch.equal(ours, theirs.float())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    cols=st.integers(1, 9),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    level=st.floats(-0.5, 1.5),
    data=st.data(),
)
def test_masks_follow_the_definition(
    rows: int, cols: int, block: tuple[int, int], level: float, data: st.DataObject
) -> None:
    zeros = data.draw(st.integers(0, math.prod(block)))
    order = torch.randperm(rows * cols, generator=torch.Generator().manual_seed(rows * 10 + cols))
    weight = (1.0 + order).view(rows, cols).sqrt() * torch.where(order.view(rows, cols) % 2 == 0, 1.0, -1.0)
    options: dict[str, Any] = {"sparsity_level": level, "sparse_block_shape": block, "zeros_per_block": zeros}
    means = {
        round(weight[i : i + block[0], j : j + block[1]].square().mean().item(), 4)
        for i in range(0, rows, block[0])
        for j in range(0, cols, block[1])
    }
    blocks = math.ceil(rows / block[0]) * math.ceil(cols / block[1])
    result = masks(ao, weight, **options)
    if len(means) == blocks:  # no ties, which may fall either way
        assert torch.equal(result, by_hand(weight, level, block, zeros))
    assert result.shape == weight.shape


def test_two_of_four() -> None:
    options: dict[str, Any] = {"sparsity_level": 1.0, "sparse_block_shape": (1, 4), "zeros_per_block": 2}
    weight = torch.tensor([[1.0, -5.0, 3.0, 2.0, 9.0, 8.0]])
    assert torch.equal(masks(ao, weight, **options), torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.0, 0.0]]))
    wide = torch.randn(8, 32)
    assert torch.equal(masks(ao, wide, **options), masks(original, wide, **options).float())
    assert (masks(ao, wide, **options).view(8, 8, 4).sum(2) == 2).all()


def test_masked_weights_stay_masked_at_the_same_level() -> None:
    weight = torch.randn(8, 8)
    once, twice = (masks(ao, weight, steps, sparsity_level=0.5) for steps in (1, 2))
    assert torch.equal(once, twice)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_masks_keep_the_type_of_the_weight(dtype: torch.dtype) -> None:
    layer = nn.Linear(8, 8, bias=False).to(dtype)
    sparsifier = ao.WeightNormSparsifier(0.5, zeros_per_block=2)
    sparsifier.prepare(nn.Sequential(layer))
    sparsifier.step()
    assert layer.weight.dtype == dtype
    assert layer.parametrizations.weight[0].mask.dtype == dtype


@pytest.mark.parametrize(
    ("entry", "kind", "words"),
    [
        ({"zeros_per_block": 5}, ValueError, r"1\.weight: zeros_per_block is 5.*4"),
        ({"zeros_per_block": -1}, ValueError, "zeros_per_block"),
        ({"zeros_per_block": 1.5}, ValueError, "zeros_per_block"),
        ({"sparse_block_shape": (0, 4)}, ValueError, "sparse_block_shape"),
        ({"sparse_block_shape": 4}, ValueError, "sparse_block_shape"),
        ({"sparsity_level": "half"}, TypeError, "'half' is no number"),
        ({"sparsity_level": None}, TypeError, "no number"),
        ({"sparsity_level": True}, TypeError, "no number"),
        ({"sparsity_level": torch.ones(2)}, TypeError, "no number"),
        ({"sparsity_level": math.nan}, ValueError, "nan"),
    ],
)
def test_bad_settings_are_named_before_and_after_preparing(
    entry: dict[str, Any], kind: type, words: str, unchanged: Any
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sparsifier = ao.WeightNormSparsifier()
    with unchanged(model), pytest.raises(kind, match=words) as caught:
        sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "1.weight"} | entry])
    assert isinstance(caught.value, SecateurError)
    sparsifier.prepare(model)
    sparsifier.groups[1].update(entry)
    with unchanged(model), pytest.raises(kind, match=words):
        sparsifier.step()


def test_levels_may_be_any_kind_of_number() -> None:
    weight = torch.randn(4, 8)
    for level in (torch.tensor(0.5), 1, 0):
        assert torch.equal(masks(ao, weight, sparsity_level=level), masks(ao, weight, sparsity_level=float(level)))


@pytest.mark.parametrize("kind", [ao.WeightNormSparsifier, ao.NearlyDiagonalSparsifier])
def test_only_matrices(kind: type[ao.BaseSparsifier], unchanged: Any) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3))
    for name in ("0.weight", "0.bias"):
        with unchanged(model), pytest.raises(ValueError, match="matrix") as caught:
            kind().prepare(model, [{"tensor_fqn": name}])
        assert isinstance(caught.value, SecateurError)


@pytest.mark.parametrize("norm", [3, 0, "fro"])
def test_unknown_norms(norm: Any) -> None:
    with pytest.raises(NotImplementedError, match="norm") as caught:
        ao.WeightNormSparsifier(norm=norm)
    assert isinstance(caught.value, SecateurError)


# -- nearly diagonal ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3), (1, 1)])
@pytest.mark.parametrize("nearliness", [-1, 0, 1, 2, 3, 4, 5, 7, 9, 11])
def test_nearly_diagonal_is_the_original(shape: tuple[int, int], nearliness: int, unchanged: Any) -> None:
    ours, theirs = nn.Sequential(nn.Linear(*shape)), nn.Sequential(nn.Linear(*shape))
    sparsifiers = ao.NearlyDiagonalSparsifier(nearliness), original.NearlyDiagonalSparsifier(nearliness)
    for sparsifier, model in zip(sparsifiers, (ours, theirs), strict=True):
        sparsifier.prepare(model, None)
    if nearliness > 0 and (nearliness % 2 == 0 or nearliness // 2 >= min(shape)):
        with pytest.raises(ValueError, match="nearliness"):
            sparsifiers[1].step()
        with unchanged(ours), pytest.raises(ValueError, match=r"0\.weight: nearliness") as caught:
            sparsifiers[0].step()
        assert isinstance(caught.value, SecateurError)
        return
    for sparsifier in sparsifiers:
        sparsifier.step()
    assert torch.equal(ours[0].parametrizations.weight[0].mask, theirs[0].parametrizations.weight[0].mask)
