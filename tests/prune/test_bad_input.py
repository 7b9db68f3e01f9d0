"""Bad input: torch's type of error where it raises one, words that help, and a module that is as it was."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from secateur import SecateurError, prune


def layer():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def state(module):
    return (
        {k: id(v) for k, v in module.named_parameters()},
        {k: id(v) for k, v in module.named_buffers()},
        {k: v.clone() for k, v in module.state_dict(keep_vars=False).items()},
        {k: id(v) for k, v in module._forward_pre_hooks.items()},
        {k: id(v) for k, v in module.__dict__.items()},
        [len(h) for h in module._forward_pre_hooks.values() if isinstance(h, prune.PruningContainer)],
    )


def assert_same(before, after):
    assert before[0] == after[0]
    assert before[1] == after[1]
    assert before[2].keys() == after[2].keys()
    for key, value in before[2].items():
        torch.testing.assert_close(value, after[2][key], rtol=0, atol=0, equal_nan=True)
    assert before[3:] == after[3:]


SINGLE = {
    "amount of another type": lambda p, m: p.l1_unstructured(m, "weight", "half"),
    "amount None": lambda p, m: p.random_unstructured(m, "weight", None),
    "amount above one": lambda p, m: p.l1_unstructured(m, "weight", 1.5),
    "amount negative": lambda p, m: p.l1_unstructured(m, "weight", -1),
    "amount negative fraction": lambda p, m: p.random_structured(m, "weight", -0.5, 0),
    "amount nan": lambda p, m: p.l1_unstructured(m, "weight", float("nan")),
    "count too large": lambda p, m: p.l1_unstructured(m, "weight", 13),
    "count of channels too large": lambda p, m: p.ln_structured(m, "weight", 5, 2, 0),
    "no such name": lambda p, m: p.l1_unstructured(m, "wieght", 0.5),
    "name not a string": lambda p, m: p.l1_unstructured(m, 3, 0.5),
    "not a module": lambda p, m: p.l1_unstructured("linear", "weight", 0.5),
    "scores not a tensor": lambda p, m: p.l1_unstructured(m, "weight", 0.5, [1, 2]),
    "scores of another shape": lambda p, m: p.l1_unstructured(m, "weight", 0.5, torch.ones(3, 5)),
    "scores of another shape, channels": lambda p, m: p.ln_structured(m, "weight", 1, 2, 0, torch.ones(12)),
    "channels of a vector": lambda p, m: p.ln_structured(m, "bias", 1, 2, 0),
    "random channels of a vector": lambda p, m: p.random_structured(m, "bias", 1, 0),
    "dim too large": lambda p, m: p.ln_structured(m, "weight", 1, 2, 2),
    "dim too small": lambda p, m: p.random_structured(m, "weight", 1, -3),
    "dim not an integer": lambda p, m: p.ln_structured(m, "weight", 1, 2, "out"),
    "no such norm": lambda p, m: p.ln_structured(m, "weight", 1, "manhattan", 0),
    "mask of another shape": lambda p, m: p.custom_from_mask(m, "weight", torch.ones(4, 3)),
    "mask not a tensor": lambda p, m: p.custom_from_mask(m, "weight", [1, 0]),
    "nothing to remove": lambda p, m: p.remove(m, "weight"),
    "removing from what is not a module": lambda p, m: p.remove(3, "weight"),
    "is_pruned of what is not a module": lambda p, m: p.is_pruned(3),
    "removing a method not applied": lambda p, m: p.L1Unstructured(1).remove(m),
    "global over nothing": lambda p, m: p.global_unstructured([], p.L1Unstructured, amount=1),
    "global over a number": lambda p, m: p.global_unstructured(3, p.L1Unstructured, amount=1),
    "global over modules": lambda p, m: p.global_unstructured([m], p.L1Unstructured, amount=1),
    "global, no such name": lambda p, m: p.global_unstructured(
        [(m, "weight"), (m, "wieght")], p.L1Unstructured, amount=1
    ),
    "global, count too large": lambda p, m: p.global_unstructured([(m, "weight")], p.L1Unstructured, amount=99),
    "global, no amount": lambda p, m: p.global_unstructured([(m, "weight")], p.L1Unstructured),
    "global, method not a class": lambda p, m: p.global_unstructured([(m, "weight")], "l1", amount=1),
    "global, structured": lambda p, m: p.global_unstructured([(m, "weight")], p.LnStructured, n=2, amount=1),
    "global, scores a list": lambda p, m: p.global_unstructured([(m, "weight")], p.L1Unstructured, [1], amount=1),
    "global, scores of another shape": lambda p, m: p.global_unstructured(
        [(m, "weight")], p.L1Unstructured, {(m, "weight"): torch.ones(2, 2)}, amount=1
    ),
    "empty scores and mask": lambda p, m: p.L1Unstructured(1).prune(torch.ones(2), torch.ones(3)),
    "prune with other scores": lambda p, m: p.L1Unstructured(1).prune(torch.ones(2), None, torch.ones(3)),
}


@pytest.mark.parametrize("call", SINGLE.values(), ids=SINGLE.keys())
def test_the_type_of_torch_and_nothing_changed(call):
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        call(torch_prune, layer())
    module = layer()
    before = state(module)
    with pytest.raises(SecateurError) as ours:
        call(prune, module)
    assert isinstance(ours.value, type(theirs.value))
    assert len(str(ours.value)) > 20
    assert_same(before, state(module))


@pytest.mark.parametrize("call", SINGLE.values(), ids=SINGLE.keys())
def test_nothing_changed_on_a_module_that_is_pruned_already(call):
    module = layer()
    for name in ("weight", "bias"):
        prune.identity(module, name)
    prune.l1_unstructured(module, "weight", 1)
    module(torch.ones(1, 4))
    before = state(module)
    try:
        call(prune, module)
    except SecateurError:
        assert_same(before, state(module))
    else:
        assert call is SINGLE["nothing to remove"]


# What torch accepts, or leaves half done, and this library refuses.
REFUSED = {
    "parameter that is None": lambda m: prune.l1_unstructured(nn.Linear(2, 2, bias=False), "bias", 0.5),
    "buffer": lambda m: prune.l1_unstructured(nn.BatchNorm1d(4), "running_mean", 0.5),
    "nan in scores": lambda m: prune.l1_unstructured(m, "weight", 1, torch.full((3, 4), float("nan"))),
    "nan in scores of channels": lambda m: prune.ln_structured(m, "weight", 1, 2, 0, torch.full((3, 4), float("nan"))),
    "norm not a number": lambda m: prune.ln_structured(m, "weight", 1, [2], 0),
    "norm nan": lambda m: prune.ln_structured(m, "weight", 1, float("nan"), 0),
    "uninitialised": lambda m: prune.l1_unstructured(nn.LazyLinear(3), "weight", 1),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_refused(call):
    module = layer()
    before = state(module)
    with pytest.raises(SecateurError):
        call(module)
    assert_same(before, state(module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "call",
    [
        lambda m: prune.l1_unstructured(m, "weight", 1),
        lambda m: prune.random_unstructured(m, "weight", 1),
        lambda m: prune.ln_structured(m, "weight", 1, 0, 0),
        lambda m: prune.custom_from_mask(m, "weight", torch.ones(3, 4)),
        lambda m: prune.global_unstructured([(m, "bias"), (m, "weight")], prune.L1Unstructured, amount=1),
    ],
)
def test_nan_in_weights_is_refused(call, dtype):
    module = layer().to(dtype)
    module.weight.data[1, 2] = float("nan")
    before = state(module)
    with pytest.raises(ValueError, match=r"Linear\.weight: the weight contains NaN"):
        call(module)
    assert_same(before, state(module))


def test_infinite_weights_are_ranked():
    module = layer()
    module.weight.data[1, 2] = float("inf")
    assert prune.l1_unstructured(module, "weight", 11).weight_mask[1, 2] == 1


def test_a_message_says_where_what_and_what_to_do():
    with pytest.raises(SecateurError) as error:
        prune.l1_unstructured(layer(), "wieght", 0.5)
    assert "Linear.wieght" in str(error.value)
    assert "weight, bias" in str(error.value)


class Failing(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def __init__(self, at):
        self.at = at

    def compute_mask(self, t, default_mask):
        if self.at == "compute":
            raise RuntimeError("no mask today")
        return default_mask

    def apply_mask(self, module):
        if self.at == "apply":
            raise RuntimeError("no weight today")
        return super().apply_mask(module)


@pytest.mark.parametrize("kind", [nn.Linear, nn.RNN])
@pytest.mark.parametrize("at", ["compute", "apply"])
def test_a_method_that_fails_leaves_no_trace(kind, at):
    module = kind(4, 3)
    name = "weight" if kind is nn.Linear else "weight_ih_l0"
    before, flat = state(module), [id(w) for w in getattr(module, "_flat_weights", [])]
    with pytest.raises(RuntimeError, match="today"):
        Failing.apply(module, name, at)
    assert_same(before, state(module))
    assert flat == [id(w) for w in getattr(module, "_flat_weights", [])]


def test_a_failure_at_the_very_end_restores_the_flat_weights_of_an_rnn(monkeypatch):
    module = nn.LSTM(4, 3)
    before, flat = state(module), [id(w) for w in module._flat_weights]

    def failing(module, hook):
        raise MemoryError

    monkeypatch.setattr(nn.Module, "register_forward_pre_hook", failing)
    with pytest.raises(MemoryError):
        prune.l1_unstructured(module, "weight_ih_l0", 1)
    assert_same(before, state(module))
    assert flat == [id(w) for w in module._flat_weights]


def test_a_failure_at_the_last_of_many_undoes_the_first(monkeypatch):
    first, second = layer(), prune.l1_unstructured(layer(), "weight", 2)
    before = state(first), state(second)
    real = nn.Module.register_buffer

    def failing(module, name, *args, **kwargs):
        if module is second:
            raise MemoryError
        return real(module, name, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "register_buffer", failing)
    with pytest.raises(MemoryError):
        prune.global_unstructured([(first, "weight"), (second, "weight")], prune.L1Unstructured, amount=0.5)
    assert_same(before[0], state(first))
    assert_same(before[1], state(second))


def test_a_container_is_not_changed_by_a_failing_round():
    module = prune.l1_unstructured(prune.l1_unstructured(layer(), "weight", 1), "weight", 1)
    container = next(iter(module._forward_pre_hooks.values()))
    with pytest.raises(ValueError, match="left to prune"):
        prune.l1_unstructured(module, "weight", 11)
    assert len(container) == 2


def test_two_hooks_on_one_parameter_are_refused():
    module = prune.identity(layer(), "weight")
    module.register_forward_pre_hook(copy.copy(next(iter(module._forward_pre_hooks.values()))))
    with pytest.raises(AssertionError, match="PruningContainer"):
        prune.l1_unstructured(module, "weight", 1)


def test_names_that_pruning_needs_must_be_free():
    module = layer()
    module.register_buffer("weight_mask", torch.ones(1))
    with pytest.raises(ValueError, match="weight_mask"):
        prune.l1_unstructured(module, "weight", 1)
    assert "weight" in dict(module.named_parameters())


def test_a_mask_of_the_wrong_shape_from_a_method_is_refused():
    class Wrong(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t, default_mask):
            return default_mask[:1]

    module = layer()
    with pytest.raises(SecateurError, match="computed mask"):
        Wrong.apply(module, "weight")
    assert not prune.is_pruned(module)


@pytest.mark.parametrize(
    ("kind", "error"), [("weird", ValueError), (None, AttributeError), ("structured", AttributeError)]
)
def test_a_method_without_a_proper_type(kind, error):
    class Odd(prune.BasePruningMethod):
        PRUNING_TYPE = kind

        def compute_mask(self, t, default_mask):
            return default_mask

    module = prune.identity(layer(), "weight")
    with pytest.raises(error):
        Odd.apply(module, "weight")
