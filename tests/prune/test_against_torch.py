"""The same names, signatures and results as `torch.nn.utils.prune`, and one state dict for both."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from secateur import prune

NAMES = sorted(
    name for name, value in vars(torch_prune).items() if getattr(value, "__module__", None) == torch_prune.__name__
)


def signature(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_there_are_names_to_compare():
    assert {"BasePruningMethod", "global_unstructured", "_compute_norm"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_the_signature_of_torch(name):
    theirs, ours = getattr(torch_prune, name), getattr(prune, name)
    assert signature(ours) == signature(theirs)
    if inspect.isclass(theirs):
        assert getattr(ours, "PRUNING_TYPE", None) == getattr(theirs, "PRUNING_TYPE", None)
        for method, value in vars(theirs).items():
            if callable(getattr(theirs, method)) and not method.startswith("__") and not isinstance(value, type):
                assert signature(getattr(ours, method)) == signature(getattr(theirs, method)), method


def conv():
    torch.manual_seed(0)
    return nn.Conv2d(4, 6, 3)


CALLS = {
    "identity": lambda p, m: p.identity(m, "weight"),
    "l1": lambda p, m: p.l1_unstructured(m, "weight", 0.37),
    "l1 count": lambda p, m: p.l1_unstructured(m, "weight", 100),
    "l1 bias": lambda p, m: p.l1_unstructured(m, "bias", 2),
    "l1 none": lambda p, m: p.l1_unstructured(m, "weight", 0),
    "l1 all": lambda p, m: p.l1_unstructured(m, "weight", 1.0),
    "l1 scores": lambda p, m: p.l1_unstructured(m, "weight", 0.5, m.weight.detach().sin()),
    "random": lambda p, m: p.random_unstructured(m, "weight", 0.5),
    "random rows": lambda p, m: p.random_structured(m, "weight", 2, 0),
    "random columns": lambda p, m: p.random_structured(m, "weight", 0.5, -1),
    "ln rows": lambda p, m: p.ln_structured(m, "weight", 0.5, 2, 0),
    "ln inf": lambda p, m: p.ln_structured(m, "weight", 1, float("inf"), 1),
    "ln half": lambda p, m: p.ln_structured(m, "weight", 1, 0.5, 2),
    "ln three": lambda p, m: p.ln_structured(m, "weight", 1, 3, 3),
    "mask": lambda p, m: p.custom_from_mask(m, "bias", torch.tensor([0, 1, 1, 0, 1, 0])),
    "global": lambda p, m: p.global_unstructured([(m, "weight"), (m, "bias")], p.L1Unstructured, amount=0.6),
    "global random": lambda p, m: p.global_unstructured([(m, "weight"), (m, "bias")], p.RandomUnstructured, amount=40),
}


@pytest.mark.parametrize("second", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("first", CALLS.values(), ids=CALLS.keys())
def test_two_rounds_give_the_masks_of_torch(first, second):
    results = []
    for library in (torch_prune, prune):
        module = conv()
        try:
            for call in (first, second):
                torch.manual_seed(7)
                call(library, module)
        except (ValueError, RuntimeError) as error:
            results.append(type(error))
            continue
        results.append(module)
    theirs, ours = results
    if isinstance(theirs, type):
        assert issubclass(ours, theirs)
        return
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
        assert ours.state_dict()[key].dtype == value.dtype
    x = torch.ones(1, 4, 5, 5)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize(("source", "target"), [(torch_prune, prune), (prune, torch_prune)])
def test_state_dicts_go_both_ways(source, target):
    a, b = conv(), nn.Conv2d(4, 6, 3)
    source.l1_unstructured(a, "weight", 0.5)
    source.ln_structured(a, "weight", 1, 2, 0)
    target.identity(b, "weight")
    x = torch.ones(1, 4, 5, 5)
    with torch.no_grad():
        b(x)
        b.load_state_dict(a.state_dict())
        assert torch.equal(a(x), b(x))
    target.remove(b, "weight")
    assert torch.equal(a(x), b(x))


def test_what_torch_pruned_can_be_seen_pruned_on_and_removed():
    module = conv()
    torch_prune.l1_unstructured(module, "weight", 10)
    assert prune.is_pruned(module)
    prune.l1_unstructured(module, "weight", 10)
    hook = next(iter(module._forward_pre_hooks.values()))
    assert isinstance(hook, prune.PruningContainer)
    assert len(hook) == 2
    assert int((module.weight_mask == 0).sum()) == 20
    prune.remove(module, "weight")
    assert not prune.is_pruned(module)
    torch_prune.l1_unstructured(module, "weight", 30)
    prune.remove(module, "weight")
    assert int((module.weight == 0).sum()) == 30
    assert isinstance(module.weight, nn.Parameter)


def test_torch_accepts_what_was_pruned_here():
    module = conv()
    prune.l1_unstructured(module, "weight", 10)
    prune.l1_unstructured(module, "weight", 10)
    assert torch_prune.is_pruned(module)
    hook = next(iter(module._forward_pre_hooks.values()))
    assert isinstance(hook, torch_prune.PruningContainer)
    assert isinstance(hook[0], torch_prune.L1Unstructured)
    torch_prune.remove(module, "weight")
    assert int((module.weight == 0).sum()) == 20
    assert not torch_prune.is_pruned(module)


def test_methods_of_torch_work_globally():
    module = conv()
    prune.global_unstructured([(module, "weight"), (module, "bias")], torch_prune.L1Unstructured, amount=100)
    assert int((module.weight_mask == 0).sum() + (module.bias_mask == 0).sum()) == 100
