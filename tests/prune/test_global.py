"""Pruning over many parameters as one."""

import pytest
import torch
from torch import nn

from secateur import prune


def net(*shapes):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(i, o) for o, i in shapes))


def weights(model):
    return [(layer, "weight") for layer in model]


def zeros(model):
    return sum(int((layer.weight_mask == 0).sum()) for layer in model)


def test_the_smallest_of_all_go():
    model = net((4, 3), (2, 4), (5, 2))
    everything = torch.cat([layer.weight.flatten() for layer in model]).abs()
    border = everything.sort().values[14].item()
    prune.global_unstructured(weights(model), prune.L1Unstructured, amount=15)
    for layer in model:
        assert torch.equal(layer.weight_mask, (layer.weight_orig.abs() > border).float())


@pytest.mark.parametrize("method", [prune.L1Unstructured, prune.RandomUnstructured])
@pytest.mark.parametrize("value", [None, 0.5])
def test_exactly_the_amount_goes_round_by_round_ties_included(method, value):
    model = net((7, 5), (3, 7))
    if value is not None:
        for layer in model:
            nn.init.constant_(layer.weight, value)
    for left in (28, 14, 7, 3):  # half of what is left; of seven, four go
        prune.global_unstructured(weights(model), method, amount=0.5)
        assert 56 - zeros(model) == left


def test_a_generator_of_parameters():
    model = net((4, 3), (2, 4))
    prune.global_unstructured(((layer, "weight") for layer in model), prune.L1Unstructured, amount=7)
    assert zeros(model) == 7


def test_weights_and_biases_together():
    layer = nn.Linear(3, 3)
    prune.global_unstructured([(layer, "weight"), (layer, "bias")], prune.L1Unstructured, amount=1.0)
    assert layer.weight.abs().sum() == layer.bias.abs().sum() == 0


def test_scores_for_some_of_the_parameters():
    first, second = net((1, 3), (1, 3))
    first.weight.data.fill_(1)
    second.weight.data.fill_(2)
    scores = {(second, "weight"): torch.tensor([[0.0, 9.0, 0.5]])}
    prune.global_unstructured([(first, "weight"), (second, "weight")], prune.L1Unstructured, scores, amount=2)
    assert first.weight_mask.tolist() == [[1, 1, 1]]
    assert second.weight_mask.tolist() == [[0, 1, 0]]


def test_the_same_parameter_twice_counts_once():
    layer = nn.Linear(4, 3)
    prune.global_unstructured([(layer, "weight")] * 2, prune.L1Unstructured, amount=6)
    assert int(layer.weight_mask.sum()) == 6
    assert isinstance(next(iter(layer._forward_pre_hooks.values())), prune.CustomFromMask)


def test_a_shared_parameter_counts_once_and_is_pruned_alike():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    for left in (8, 4):
        prune.global_unstructured([(first, "weight"), (second, "weight")], prune.L1Unstructured, amount=0.5)
        assert int(first.weight_mask.sum()) == left
        assert torch.equal(first.weight, second.weight)
    assert first.weight_orig is second.weight_orig


def test_a_shared_parameter_with_two_different_masks_is_two():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    prune.custom_from_mask(first, "weight", torch.tensor([[0, 1], [1, 1]]))
    prune.global_unstructured([(first, "weight"), (second, "weight")], prune.L1Unstructured, amount=1.0)
    assert first.weight_mask.sum() == second.weight_mask.sum() == 0


def test_a_method_of_the_user():
    class Positive(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t, default_mask):
            assert t.dim() == 1
            return default_mask * (t <= 0)

    model = net((4, 3), (2, 4))
    prune.custom_from_mask(model[0], "weight", torch.eye(4)[:, :3])
    prune.global_unstructured(weights(model), Positive)
    assert torch.equal(model[0].weight_mask, torch.eye(4)[:, :3] * (model[0].weight_orig <= 0))
    assert torch.equal(model[1].weight_mask, (model[1].weight_orig <= 0).float())


def test_a_subclass_that_overrides_compute_mask_is_obeyed():
    class Nothing(prune.L1Unstructured):
        def compute_mask(self, t, default_mask):
            return default_mask

    model = net((4, 3), (2, 4))
    for _ in range(2):
        prune.global_unstructured(weights(model), Nothing, amount=0.5)
        assert zeros(model) == 0


class TestChannels:
    def model(self):
        first, second = nn.Linear(100, 2, bias=False), nn.Linear(4, 3, bias=False)
        first.weight = nn.Parameter(torch.tensor([0.1, 0.4]).view(2, 1).expand(2, 100).clone())
        second.weight = nn.Parameter(torch.tensor([0.2, 0.3, 0.5]).view(3, 1).expand(3, 4).clone())
        return first, second

    def prune(self, first, second, **kwargs):
        prune.global_unstructured([(first, "weight"), (second, "weight")], **kwargs)

    @pytest.mark.parametrize("n", [1, 2, float("inf"), "fro"])
    def test_channels_of_all_sizes_are_one_ranking(self, n):
        first, second = self.model()
        self.prune(first, second, pruning_method=prune.LnStructured, n=n, dim=0, amount=0.4, normalize=True)
        assert first.weight_mask[:, 0].tolist() == [0, 1]
        assert second.weight_mask[:, 0].tolist() == [0, 1, 1]
        self.prune(first, second, pruning_method=prune.LnStructured, n=n, dim=0, amount=2, normalize=True)
        assert first.weight_mask.sum(1).tolist() == [0, 0]
        assert second.weight_mask.sum(1).tolist() == [0, 0, 4]

    def test_random_channels(self):
        first, second = self.model()
        self.prune(first, second, pruning_method=prune.RandomStructured, dim=0, amount=3, normalize=True)
        alive = first.weight_mask.amax(1).sum() + second.weight_mask.amax(1).sum()
        assert alive == 2
        assert torch.equal(first.weight_mask.amax(1), first.weight_mask.amin(1))

    def test_has_to_be_asked_for(self):
        first, second = self.model()
        with pytest.raises(TypeError, match="normalize=True"):
            self.prune(first, second, pruning_method=prune.LnStructured, n=2, dim=0, amount=1)
        assert not prune.is_pruned(first)

    def test_refuses_a_parameter_without_channels(self):
        layer = nn.Linear(3, 3)
        with pytest.raises(ValueError, match="bias"):
            prune.global_unstructured(
                [(layer, "weight"), (layer, "bias")], prune.LnStructured, n=2, dim=0, amount=1, normalize=True
            )
        assert not prune.is_pruned(layer)


def test_nothing_the_size_of_the_weights_is_allocated_but_masks_and_weights():
    """Counts the bytes of every tensor that the call allocates and keeps alive, at its peak."""
    from torch.utils._python_dispatch import TorchDispatchMode

    model = [nn.Linear(1024, 1024, bias=False) for _ in range(4)]
    size = 4 * 1024 * 1024 * 4
    storages = {}

    class Count(TorchDispatchMode):
        peak = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor):
                    ref = torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage())
                    storages.setdefault(ref.cdata, (ref, t.untyped_storage().nbytes()))
            alive = sum(nbytes for ref, nbytes in storages.values() if not ref.expired())
            Count.peak = max(Count.peak, alive)
            return out

    with Count():
        prune.global_unstructured(weights(model), prune.L1Unstructured, amount=0.5)
    assert Count.peak < 3 * size + 8 * 2**20  # the weights themselves, the masks, the masked weights, and chunks
