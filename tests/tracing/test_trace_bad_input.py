"""A mistake of the user's is shown as that: where, what, and what to do."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import Linear

import secateur as sec
from oracle import Net

X = torch.randn(2, 6)


def raised(model, example):
    with pytest.raises(sec.TraceError) as caught:
        sec.trace(model, example)
    assert isinstance(caught.value, sec.SecateurError)
    return str(caught.value)


@pytest.mark.parametrize("model", [lambda x: x, nn.functional.relu, "model", None, torch.zeros(3), Linear])
def test_what_is_not_a_module(model):
    assert "a model is an nn.Module, not " in raised(model, X)


def test_no_parameters():
    assert raised(nn.Sequential(nn.ReLU()), X) == "Sequential has no parameters, so there is nothing to cut"


@pytest.mark.parametrize(
    "example",
    [torch.randn(2, 7), torch.randn(2), (X, X), {"y": X}, "text", None, [X, X], {"input": X, "extra": 1}],
    ids=["width", "rank", "too many", "wrong keyword", "text", "nothing", "list", "extra keyword"],
)
def test_an_example_that_does_not_fit(example):
    message = raised(nn.Sequential(Linear(6, 8), Linear(8, 3)), example)
    assert message.startswith("Sequential could not be run on the example: ")
    assert "Check that model(example) works" in message


def test_an_error_of_the_models_own_code_is_shown_with_its_line():
    def run(n, x):
        n.a(x)
        raise ValueError("seven is not a colour")

    message = raised(Net(run, a=Linear(6, 8)), X)
    line = run.__code__.co_firstlineno + 2
    assert f"ValueError at test_trace_bad_input.py:{line}: seven is not a colour" in message


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_nested_tensors_are_named_with_their_line(layout):
    def run(n, x):
        rows = torch.nested.nested_tensor([x[:1], x[1:]], layout=layout)
        return torch.nested.to_padded_tensor(n.b(torch.relu(n.a(rows))), 0.0)

    model = Net(run, a=Linear(6, 8), b=Linear(8, 3))
    assert model(X).shape == (2, 1, 3)
    line = run.__code__.co_firstlineno + 1  # where they are made
    assert f"uses nested tensors at test_trace_bad_input.py:{line}" in raised(model, X)


def test_the_cause_is_kept():
    def run(n, x):
        raise KeyError("missing")

    with pytest.raises(sec.TraceError) as caught:
        sec.trace(Net(run, a=Linear(6, 8)), X)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("output", [None, 3, "text", (), {}, [None, 1.5]], ids=str)
def test_outputs_with_no_tensor(output):
    def run(n, x):
        n.a(x)
        return output

    message = raised(Net(run, a=Linear(6, 8)), X)
    assert message.startswith("there is no tensor in what the model returns")
    assert type(output).__name__ in message


def test_torchscript_is_refused_and_unharmed():
    scripted = torch.jit.script(nn.Sequential(Linear(6, 8), Linear(8, 3)))
    net = Net(lambda n, x: n.m(x), m=scripted)
    before = net(X)
    assert "m is TorchScript" in raised(net, X)
    assert torch.equal(net(X), before)


def test_a_model_on_meta_that_needs_real_numbers():
    with torch.device("meta"):
        net = Net(lambda n, x: n.b(n.a(x)) if n.a(x).sum().item() > 0 else x, a=Linear(6, 8), b=Linear(8, 3))
    assert "could not be run on the example" in raised(net, torch.zeros(2, 6, device="meta"))


def test_lazy_modules_that_were_never_run():
    assert "lazy layers that have not run; call the model once" in raised(
        nn.Sequential(nn.LazyLinear(8), Linear(8, 3)), X
    )


def test_an_interrupt_is_not_swallowed():
    def run(n, x):
        raise KeyboardInterrupt

    net = Net(run, a=Linear(6, 8))
    with pytest.raises(KeyboardInterrupt):
        sec.trace(net, X)
    assert type(net.a.weight) is nn.Parameter


def test_a_wrong_example_leaves_no_traceback_on_the_screen() -> None:
    code = (
        "import torch, secateur as sec\n"
        "try:\n    sec.trace(torch.nn.Linear(4, 3), torch.zeros(1, 5))\n"
        "except sec.TraceError:\n    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("refused\n", "")
