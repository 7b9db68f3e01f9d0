"""What each method chooses, on tensors that can be checked by eye."""

import math

import pytest
import torch
from torch import nn

from secateur import prune
from secateur.prune.norms import normalized_norm

T = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]])
ONES = torch.ones_like(T)


def linear(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return layer


def test_l1_takes_the_smallest_of_what_is_left():
    layer = linear(T)
    prune.l1_unstructured(layer, "weight", amount=1 / 3)
    assert layer.weight.tolist() == [[0, 0, 3], [-4, 5, -6]]
    prune.l1_unstructured(layer, "weight", amount=0.5)
    assert layer.weight.tolist() == [[0, 0, 0], [0, 5, -6]]
    assert torch.equal(layer.weight_orig, T)


def test_scores_take_the_place_of_weights():
    layer = prune.l1_unstructured(linear(T), "weight", amount=2, importance_scores=T.flip(1))
    assert layer.weight_mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    layer = prune.ln_structured(linear(T), "weight", 1, n=1, dim=0, importance_scores=-T.flip(0))
    assert layer.weight_mask.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_the_mask_has_the_dtype_of_the_parameter_whatever_that_of_the_scores():
    layer = linear(T)
    for _ in range(2):
        prune.l1_unstructured(layer, "weight", amount=1, importance_scores=T.double())
        assert layer.weight_mask.dtype == torch.float32


def test_a_second_round_ranks_by_the_weights_as_they_are_now():
    layer = prune.identity(linear(T), "weight")
    layer.weight_orig.data[1, 2] = 0.5  # no forward in between
    prune.l1_unstructured(layer, "weight", amount=1)
    assert layer.weight_mask.tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("amount", [0, 1, 6, 0.0, 0.4, 1.0])
def test_random_takes_exactly_the_amount(amount):
    count = amount if isinstance(amount, int) else round(amount * 6)
    layer = prune.random_unstructured(linear(T), "weight", amount)
    assert int((layer.weight_mask == 0).sum()) == count
    assert int((layer.weight_mask == 1).sum()) == 6 - count


def test_random_reaches_every_entry_about_equally_often():
    torch.manual_seed(0)
    total = sum(prune.RandomUnstructured(0.5).compute_mask(T, ONES) for _ in range(2000))
    assert torch.all((total / 2000 - 0.5).abs() < 0.05)


def test_random_on_half_precision_is_not_biased_to_the_front():
    torch.manual_seed(0)
    mask = prune.RandomUnstructured(0.5).compute_mask(torch.zeros(100_000), torch.ones(100_000, dtype=torch.bfloat16))
    assert int((mask == 0).sum()) == 50_000
    assert abs(int((mask[:50_000] == 0).sum()) - 25_000) < 500


def test_random_leaves_pruned_entries_out_of_the_draw():
    layer = prune.custom_from_mask(linear(T), "weight", torch.tensor([[1, 0, 0], [0, 0, 1]]))
    prune.random_unstructured(layer, "weight", amount=1)
    assert int(layer.weight_mask.sum()) == 1
    assert layer.weight_mask[0, 1] == layer.weight_mask[1, 0] == 0


def test_channels_of_smallest_norm_go():
    assert prune.LnStructured(1, n=2, dim=0).prune(T).tolist() == [[0, 0, 0], [-4, 5, -6]]
    assert prune.LnStructured(2, n=1, dim=-1).prune(T).tolist() == [[0, 0, 3], [0, 0, -6]]
    assert prune.LnStructured(1, n=-math.inf, dim=1).compute_mask(T, ONES).tolist() == [[0, 1, 1], [0, 1, 1]]


def test_dead_channels_are_left_out_of_the_count():
    layer = prune.ln_structured(linear(T), "weight", amount=1, n=2, dim=1)
    prune.ln_structured(layer, "weight", amount=0.5, n=2, dim=1)
    assert layer.weight_mask.tolist() == [[0, 0, 1], [0, 0, 1]]


def test_random_structured_takes_whole_channels():
    layer = prune.random_structured(nn.Conv2d(4, 6, 3), "weight", amount=0.5, dim=0)
    assert sorted(layer.weight_mask.flatten(1).sum(1).tolist()) == [0, 0, 0, 36, 36, 36]


@pytest.mark.parametrize("n", [0, 0.5, 1, 2, 3, math.inf, -math.inf, -1, "fro"])
@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -4])
def test_norms_are_those_of_linalg(n, dim):
    t = torch.randn(2, 3, 4, 5)
    slices = t.movedim(dim, 0).flatten(1)
    order = 2 if n == "fro" else n
    expected = torch.stack([torch.linalg.vector_norm(row, order) for row in slices])
    torch.testing.assert_close(prune._compute_norm(t, n, dim), expected)


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (3, 4, 2, 2)])
def test_the_nuclear_norm_sums_singular_values(shape):
    t = torch.randn(shape)
    matrices = t.unsqueeze(1) if t.dim() == 2 else t.flatten(2)
    expected = torch.linalg.svdvals(matrices).sum(-1)
    torch.testing.assert_close(prune._compute_norm(t, "nuc", 0), expected)
    assert prune.ln_structured(nn.Conv2d(2, 3, 2), "weight", 1, "nuc", 0).weight_mask.sum() == 16


@pytest.mark.parametrize("n", [1, 2, 3, 0.5, math.inf, -math.inf, "fro", "nuc", 0])
def test_normalised_norms_do_not_depend_on_the_size(n):
    small, large = (
        normalized_norm(torch.full((2, 4), 0.5), n, 0),
        normalized_norm(torch.full((2, 400), 0.5), n, 0),
    )
    torch.testing.assert_close(small, large)
    if n != 0:
        torch.testing.assert_close(small, torch.full((2,), 0.5))


def test_a_custom_mask_multiplies_in():
    layer = prune.custom_from_mask(linear(T), "weight", torch.tensor([[1, 0, 1], [1, 1, 1]]))
    prune.custom_from_mask(layer, "weight", torch.tensor([[True, True, False], [True, True, True]]))
    assert layer.weight_mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert layer.weight_mask.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype):
    layer = linear(T).to(dtype)
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.random_unstructured(layer, "weight", 1)
    prune.ln_structured(layer, "weight", 1, 2, 0)
    assert layer.weight_mask.dtype == layer.weight.dtype == dtype
    assert layer(torch.ones(1, 3, dtype=dtype)).dtype == dtype
    assert int(prune.l1_unstructured(linear(T).to(dtype), "weight", 0.5).weight_mask.sum()) == 3


def test_channels_last_weights_stay_channels_last():
    conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    prune.l1_unstructured(conv, "weight", 0.5)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert int(conv.weight_mask.sum()) == 72
    assert conv.weight_orig[conv.weight_mask == 0].abs().max() <= conv.weight_orig[conv.weight_mask == 1].abs().min()


class TestContainer:
    def method(self, name="weight"):
        method = prune.L1Unstructured(1)
        method._tensor_name = name
        return method

    def test_holds_methods_in_order(self):
        a, b = self.method(), self.method()
        for container in (prune.PruningContainer(a, b), prune.PruningContainer([a, b])):
            assert len(container) == 2
            assert list(container) == [a, b]
            assert container[-1] is b
            assert container._tensor_name == "weight"

    def test_refuses_other_names_and_types(self):
        container = prune.PruningContainer(self.method())
        with pytest.raises(ValueError, match="bias"):
            container.add_pruning_method(self.method("bias"))
        with pytest.raises(TypeError):
            container.add_pruning_method("l1")
        with pytest.raises(TypeError):
            container.add_pruning_method(None)
        assert len(container) == 1

    def test_shows_a_method_what_its_type_says(self):
        seen = []

        class Spy(prune.BasePruningMethod):
            dim = 0

            def __init__(self, kind):
                self.PRUNING_TYPE = kind
                self._tensor_name = "weight"

            def compute_mask(self, t, default_mask):
                seen.append(tuple(t.shape))
                return default_mask

        mask = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
        for kind in ("unstructured", "structured", "global"):
            assert torch.equal(prune.PruningContainer(Spy(kind)).compute_mask(T, mask), mask)
        assert seen == [(2,), (1, 3), (2, 3)]
