"""Tracing changes nothing, whether it succeeds or fails midway."""

import copy
import random
from array import array

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Linear

import secateur as sec
from oracle import Net, weight
from secateur.state.transaction import untouched

X = torch.randn(2, 6)


def everything(model):
    """All that a model holds, by identity and by content."""
    held = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                held[name, key] = (id(value), copy.copy(value) if isinstance(value, dict | list | set) else value)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                held[name, key] = (
                    id(tensor), tensor.data_ptr(), tensor._version, tensor.requires_grad, tensor.grad,
                    type(tensor), tensor.detach().clone().numpy().tobytes(), dict(vars(tensor)),
                )  # fmt: skip
    return held


def surroundings():
    """What tracing might leave behind outside of the model."""
    hooks = torch.nn.modules.module
    return (
        torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes(),
        torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled(), id(F.multi_head_attention_forward),
        len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks), id(torch._C.ScriptFunction.__call__),
        torch.overrides._get_current_function_mode(), torch.utils._python_dispatch._get_current_dispatch_mode(),
    )  # fmt: skip


def run(n, x):
    n.count += 1
    n.seen.append(x.shape[0])
    n.cache["h"] = n.a(x)
    n.late = n.cache["h"] * 2
    n.steps.add_(1)
    random.random(), np.random.rand(), torch.rand(1)
    h = F.dropout(n.norm(n.drop(n.late)), 0.5, n.training)
    n.config["inner"].width = h.shape[1]
    if n.fail:
        raise RuntimeError("midway")
    return n.b(n.att(h, h, h)[0]) + n.b(h)


class Config:
    def __init__(self):
        self.width = 8
        self.names = ("a", 3)


def a_model(fail=False):
    model = Net(
        run, {"steps": torch.zeros(())}, a=Linear(6, 8), b=Linear(8, 3), drop=nn.Dropout(), norm=nn.BatchNorm1d(8),
        att=nn.MultiheadAttention(8, 2), count=0, seen=[], cache={}, fail=fail, config={"inner": Config()},
        k=(1, [2, 3]),
    )  # fmt: skip
    model.a.weight.requires_grad_(False)
    model.b.weight.grad = torch.ones(3, 8)
    model.b.weight.mark = "mine"
    model.drop.eval()
    model.norm.register_forward_hook(lambda module, args, out: out)
    return model


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fail", [False, True])
def test_the_model_and_its_surroundings_are_as_before(training, fail):
    model = a_model(fail)
    model.train(training)
    model.drop.eval()
    before, around = everything(model), surroundings()
    if fail:
        with pytest.raises(sec.TraceError, match="midway"):
            sec.trace(model, X)
    else:
        assert sec.trace(model, X).axes
    assert everything(model) == before
    assert surroundings() == around
    assert model.training is training
    assert not model.drop.training
    assert (model.count, model.seen, model.cache, hasattr(model, "late")) == (0, [], {}, False)
    assert type(model.config["inner"].width) is int
    assert type(model.k[0]) is int
    assert type(model.k[1][0]) is int


@pytest.mark.parametrize("fake", [True, False])
def test_arrays_and_generators_that_modules_hold_are_as_before(fake):
    def draw(n, x):
        n.seen[0] += 1
        n.notes[0]["h"] = n.a(x)
        n.bytes[0] = n.whole[0] = 7
        scale = n.numpy.random() + n.old.rand() + n.python.random() + torch.rand((), generator=n.torch)
        if not fake:
            float(x.sum())
        return n.b(n.a(x) * scale)

    model = Net(draw, a=Linear(6, 8), b=Linear(8, 3))
    model.seen, model.notes = np.zeros(2), np.array([{}, 1])
    model.bytes, model.whole = bytearray(b"ab"), array("i", [1])
    model.numpy, model.old = np.random.default_rng(0), np.random.RandomState(0)
    model.python, model.torch = random.Random(0), torch.Generator().manual_seed(0)

    def state():
        held = [model.seen.tolist(), model.notes.tolist(), bytes(model.bytes), model.whole.tolist()]
        draws = [model.numpy.bit_generator.state, str(model.old.get_state()), model.python.getstate()]
        return [*held, *draws, model.torch.get_state().tolist()]

    before = state()
    graph = sec.trace(model, X)
    assert graph.axes
    assert state() == before
    with untouched(model):
        model(X)
        assert state() != before
    assert state() == before


def test_the_example_is_as_before():
    def overwrite(n, x):
        return n.b(n.a(x.mul_(2)))

    x = X.clone().requires_grad_()
    sec.trace(Net(overwrite, a=Linear(6, 8), b=Linear(8, 3)), x)
    assert torch.equal(x, X)
    assert x._version == 0
    assert x.requires_grad


def test_a_run_on_real_tensors_leaves_no_trace_either():
    def data(n, x):
        n.steps += int(x.abs().sum().item())
        with torch.no_grad():
            n.p.mul_(2)
        return n.b(n.a(x) * n.p)

    model = Net(data, {"steps": torch.zeros(())}, a=Linear(6, 8), b=Linear(8, 3), p=weight(8))
    nn.init.ones_(model.p)
    before = everything(model)
    assert sec.trace(model, X).axes[0].size == 8
    assert everything(model) == before


def test_the_model_still_trains_and_saves_after_a_trace():
    model = a_model()
    state = copy.deepcopy(model.state_dict())
    sec.trace(model, X)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    model(X).sum().backward()
    assert model.b.bias.grad is not None
    copy.deepcopy(model.a)


def test_a_second_trace_finds_the_same():
    model = a_model()
    first, second = sec.trace(model, X), sec.trace(model, X)
    assert first.axes == second.axes
    assert first.blocked == second.blocked


@pytest.mark.parametrize("rnn", [nn.LSTM(6, 5, 2), nn.GRU(6, 5, bidirectional=True)], ids=["lstm", "gru"])
def test_a_recurrent_module_keeps_its_flat_weights(rnn):
    flat = [id(w) for w in rnn._flat_weights]
    net = Net(lambda n, x: n.out(n.rnn(x)[0]), rnn=rnn, out=Linear(5 if rnn.num_layers == 2 else 10, 2))
    sec.trace(net, torch.randn(4, 3, 6))
    assert [id(w) for w in rnn._flat_weights] == flat
    assert all(a is b for a, b in zip(rnn._flat_weights, rnn.parameters(), strict=True))


def test_a_parametrized_module_stays_parametrized():
    layer = nn.utils.parametrizations.weight_norm(Linear(6, 8))
    net = nn.Sequential(layer, Linear(8, 3))
    before = everything(net)
    sec.trace(net, X)
    assert everything(net) == before
    assert nn.utils.parametrize.is_parametrized(layer, "weight")


def test_hooks_of_all_modules_are_as_before():
    seen = []

    def run(n, x):
        nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
        return n.b(n.a(x))

    before = surroundings()
    net = Net(run, a=Linear(6, 8), b=Linear(8, 3))
    sec.apply(net, sec.plan(sec.trace(net, X), sec.Ratio(0.5)))
    assert surroundings()[6:8] == before[6:8] == (0, 0)
    seen.clear()
    Linear(6, 8)(X)
    assert not seen
