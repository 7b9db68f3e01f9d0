"""The masked weight is made once, and never goes stale: every way to change what it depends on."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from secateur import prune
from secateur.prune.watch import unchanged, watch


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return prune.l1_unstructured(nn.Linear(6, 5), "weight", amount=0.5)


X = torch.ones(2, 6)


def expected(layer):
    return nn.functional.linear(X, layer.weight_orig * layer.weight_mask, layer.bias)


def test_nothing_changed_nothing_recomputed(layer):
    with torch.no_grad():
        layer(X)
        before = layer.weight
        layer(X)
        assert layer.weight is before


def in_place(layer):
    layer.weight_orig.add_(1)


def data_in_place(layer):
    layer.weight_orig.data.mul_(2)


def one_entry_of_data(layer):
    kept = layer.weight_mask.nonzero()[0]
    layer.weight_orig.data[kept[0], kept[1]] = 5.0


def data_assignment(layer):
    layer.weight_orig.data = torch.randn(5, 6)


def data_assignment_twice(layer):
    layer.double()
    layer.float()
    layer.weight_orig.data.add_(1)


def detached(layer):
    layer.weight_orig.detach().sub_(3)


def through_numpy(layer):
    layer.weight_orig.detach().numpy()[:] = 2.0


def foreach(layer):
    torch._foreach_mul_([layer.weight_orig], 3.0)


def load(layer):
    layer.load_state_dict({k: v + 1 if "orig" in k else v for k, v in layer.state_dict().items()})


def load_by_assignment(layer):
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    state["weight_orig"] += 1
    layer.load_state_dict(state, assign=True)


def load_by_assignment_from_a_module_that_ran(layer):
    other = prune.identity(nn.Linear(6, 5), "weight")
    other(X)
    layer.load_state_dict(other.state_dict(), assign=True)


def mask_in_place(layer):
    layer.weight_mask.zero_()


def mask_data(layer):
    layer.weight_mask.data[0] = 1


def mask_replaced(layer):
    layer.weight_mask = torch.ones(5, 6)


def result_in_place(layer):
    layer.weight.data.fill_(9)


def result_replaced(layer):
    layer.weight = torch.full((5, 6), 9.0)


def tensors_swapped(layer):
    layer.weight = None  # its graph holds on to the parameter
    torch.utils.swap_tensors(layer.weight_orig, nn.Parameter(torch.randn(5, 6)))


def shared_memory(layer):
    layer.share_memory()
    layer(X)
    layer.weight_orig.data.add_(1)


ROUTES = [
    in_place,
    data_in_place,
    one_entry_of_data,
    data_assignment,
    data_assignment_twice,
    detached,
    through_numpy,
    foreach,
    load,
    load_by_assignment,
    load_by_assignment_from_a_module_that_ran,
    mask_in_place,
    mask_data,
    mask_replaced,
    result_in_place,
    result_replaced,
    tensors_swapped,
    shared_memory,
]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("change", ROUTES, ids=lambda f: f.__name__)
def test_a_change_is_seen(layer, change, grad):
    with torch.set_grad_enabled(grad):
        layer(X)
        layer(X)
        with torch.no_grad():
            change(layer)
        assert torch.equal(layer(X), expected(layer))


def test_every_optimiser_step_is_seen(layer):
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        layer(X).sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(layer(X), expected(layer))


def test_modules_that_share_a_weight_both_see_a_change():
    first = nn.Linear(3, 3, bias=False)
    second = nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    prune.global_unstructured([(first, "weight"), (second, "weight")], prune.L1Unstructured, amount=3)
    x = torch.ones(1, 3)
    with torch.no_grad():
        first(x), second(x)
        first.weight_orig.data.add_(1)
        assert torch.equal(first(x), second(x))  # first marks the storage anew before second looks at it
        assert torch.equal(second.weight, second.weight_orig * second.weight_mask)


def test_functional_call_uses_what_it_is_given(layer):
    with torch.no_grad():
        before = layer(X)
        given = {"weight_orig": torch.ones(5, 6)}
        inside = torch.func.functional_call(layer, given, (X,))
        assert torch.equal(inside, nn.functional.linear(X, layer.weight_mask, layer.bias))
        assert torch.equal(layer(X), before)


def test_functional_call_with_an_alias_keeps_its_gradient(layer):
    layer(X)
    alias = layer.weight_orig.detach().requires_grad_()  # the same memory, another leaf
    torch.func.functional_call(layer, {"weight_orig": alias}, (X,)).sum().backward()
    assert torch.equal(alias.grad, 2 * layer.weight_mask)
    assert layer.weight_orig.grad is None


def test_function_transforms(layer):
    layer(X)
    params = {k: v.detach() for k, v in layer.named_parameters()}

    def loss(params, x):
        return torch.func.functional_call(layer, params, (x,)).sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, X)
    assert torch.equal(grads["weight_orig"][0], layer.weight_mask)
    _, tangent = torch.func.jvp(
        lambda w: loss({**params, "weight_orig": w}, X), (params["weight_orig"],), (torch.ones(5, 6),)
    )
    assert tangent == 2 * layer.weight_mask.sum()
    assert torch.equal(layer(X), expected(layer))


def test_frozen_and_thawed(layer):
    layer.weight_orig.requires_grad_(False)
    layer(X)
    assert not layer.weight.requires_grad
    layer.weight_orig.requires_grad_(True)
    layer(X).sum().backward()
    assert torch.equal(layer.weight_orig.grad, 2 * layer.weight_mask)


def test_a_weight_made_in_inference_mode_can_be_trained_with(layer):
    layer.weight_orig.requires_grad_(False)
    with torch.inference_mode():
        layer(X)
    x = X.clone().requires_grad_()
    layer(x).sum().backward()
    assert torch.equal(x.grad[0], (layer.weight_orig * layer.weight_mask).sum(0))


def test_one_weight_serves_many_backward_passes(layer):
    for _ in range(3):
        layer(X).sum().backward()
    assert torch.equal(layer.weight_orig.grad, 6 * layer.weight_mask)


def test_a_mask_changed_between_forward_and_backward_is_refused(layer):
    out = layer(X).sum()
    layer.weight_mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_gradients_of_gradients(layer):
    grad = torch.autograd.grad(layer(X).pow(2).sum(), layer.weight_orig, create_graph=True)[0]
    grad.sum().backward()
    assert layer.weight_orig.grad is not None
    assert bool((layer.weight_orig.grad[layer.weight_mask == 0] == 0).all())
    assert bool((layer.weight_orig.grad[layer.weight_mask == 1] != 0).all())


def test_activation_checkpointing(layer):
    x = X.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert torch.equal(layer.weight_orig.grad, 2 * layer.weight_mask)


def test_a_method_with_its_own_apply_mask_is_always_asked():
    class Doubling(prune.Identity):
        def apply_mask(self, module):
            return 2 * super().apply_mask(module)

    layer = nn.Linear(6, 5, bias=False)
    Doubling.apply(layer, "weight")
    with torch.no_grad():
        for _ in range(2):
            layer.weight_orig.data.add_(1)
            assert torch.equal(layer(X), nn.functional.linear(X, 2 * layer.weight_orig))


def test_watching_does_not_move_or_copy_the_data():
    t = torch.randn(1000)
    array = t.numpy()
    stamp = watch(t)
    t.add_(1)
    assert not unchanged(t, stamp)
    assert t.numpy().ctypes.data == array.ctypes.data


def test_what_cannot_be_watched_says_so():
    assert watch(torch.from_numpy(np.zeros(3))) is None
    assert watch(torch.zeros(3).share_memory_()) is None


def test_a_copy_of_a_watched_tensor_is_not_taken_for_it():
    t = torch.zeros(3)
    stamp = watch(t)
    assert not unchanged(t.clone(), stamp)
    assert not unchanged(copy.deepcopy(t), stamp)
    assert unchanged(t, stamp)


def test_masks_can_be_mapped_over(layer):
    layer(X)
    masks = torch.stack([torch.ones(5, 6), torch.zeros(5, 6)])

    def run(mask):
        return torch.func.functional_call(layer, {"weight_mask": mask}, (X,))

    dense, empty = torch.func.vmap(run)(masks)
    torch.testing.assert_close(dense, nn.functional.linear(X, layer.weight_orig, layer.bias))
    torch.testing.assert_close(empty, layer.bias.expand(2, 5))
