"""Good files in the wrong model, and models that fail in the middle of it."""

import copy

import pytest
import torch
from crafted import IDS, Net, cut_net, fingerprint, genuine, refuses, valid
from torch import nn

import secateur as sec
from secateur.io import load, save
from secateur.io.tensors import State


def test_another_class(tmp_path):
    _, path = valid(tmp_path / "file")
    refuses(path, "it holds a 'Net', the model is a Linear; build one of the same class", nn.Linear(2, 2))


def test_an_already_cut_model(tmp_path):
    _, path = valid(tmp_path / "file")
    refuses(path, "cut already; build it anew, at full size", cut_net())
    refuses(path, "cut already", copy.deepcopy(cut_net()))
    refuses(path, "cut already", load(path, Net()))
    save(Net(), path)
    refuses(path, "cut already", cut_net())


def perceptron(inner=8, outer=2, bias=True):
    return nn.Sequential(nn.Linear(4, inner), nn.ReLU(), nn.Linear(inner, outer, bias=bias))


def test_the_same_class_in_other_sizes(tmp_path):
    path = tmp_path / "file"
    net = perceptron()
    save(sec.apply(net, sec.plan(sec.trace(net, torch.ones(1, 4)), sec.Ratio(0.5))), path)
    refuses(path, r"cuts 0\.bias of shape \(8,\), here it is \(16,\)", perceptron(16))
    refuses(path, r"cuts 0\.bias of shape \(8,\), here it is \(4,\)", perceptron(4))
    refuses(path, r"cuts 2\.weight of shape \(2, 8\)", perceptron(outer=3))
    refuses(path, r"the model lacks '2\.bias'", perceptron(bias=False))
    refuses(path, r"it lacks '3\.bias', '3\.weight' \(2 in all\)", perceptron().append(nn.Linear(2, 2)))
    save(perceptron(), path)
    refuses(path, r"0\.weight is \[8, 4\] in the file, \[16, 4\] in the model", perceptron(16))


def test_a_module_whose_class_the_cut_replaces(tmp_path):
    """Cut to fewer heads, attention becomes another class; where loading fails after that, it is torch's again."""

    def build():
        return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()

    path, small = tmp_path / "file", build()
    sec.apply(small, sec.plan(sec.trace(small, torch.ones(1, 3, 16)), sec.Ratio(0.5)))
    assert type(small.self_attn) is not nn.MultiheadAttention
    save(small.double(), path)
    refuses(path, "float64 in the file, torch.float32 in the model", build())
    assert type(load(path, build().double()).self_attn) is type(small.self_attn)


def test_tied_here_but_not_there(tmp_path):
    untied = cut_net()
    untied.out.weight = nn.Parameter(untied.out.weight.detach().clone())
    save(untied, tmp_path / "untied")
    refuses(tmp_path / "untied", r"embed\.weight and out\.weight are one tensor in the model, but not in the file")
    fresh = Net()
    fresh.out.weight = nn.Parameter(fresh.out.weight.detach().clone())
    save(cut_net(), tmp_path / "tied")
    refuses(tmp_path / "tied", r"are one tensor in the file, but not in the model", fresh)


def test_a_list_of_tied_tensors_that_lies(tmp_path):
    path = tmp_path / "file"
    for tied, words in (
        ({"embed.weight": ["out.weight", "up.bias"]}, r"it holds 'up\.bias' twice"),
        ({"embed.weight": ["embed.weight"]}, r"it holds 'embed\.weight' twice"),
        ({"nothing": ["out.weight"]}, "it ties 'nothing', which it does not hold"),
        ({"up.weight": ["out.weight"]}, "are one tensor in"),
        ({}, r"it lacks 'out\.weight'"),
        ({"embed.weight": "out.weight"}, "its list of tied tensors is none"),
        ({"embed.weight": [3]}, "its list of tied tensors is none"),
        ([], "its list of tied tensors is none"),
        (None, "its list of tied tensors is none"),
    ):
        refuses(genuine().changed(lambda said, tied=tied: said.update(tied=tied)).to(path), words)


class BrokenError(Exception):
    """A failure that nobody expects."""


@pytest.mark.parametrize("error", [BrokenError("no"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("plan", [True, False], ids=["cut", "whole"])
def test_a_failure_at_any_step_changes_nothing(tmp_path, monkeypatch, error, plan):
    """Each step of loading fails in turn; the model is as it was, and loads when nothing fails."""
    save(cut_net() if plan else Net(), tmp_path / "file")
    steps = 0
    for name in ("carry_out", "remember", "_check_tensor"):
        if plan or name == "_check_tensor":
            steps += 1
            model = Net()
            before = fingerprint(model)
            with monkeypatch.context() as patch:
                patch.setattr(f"secateur.io.loading.{name}", lambda *_: (_ for _ in ()).throw(error))
                with pytest.raises(sec.FileError if isinstance(error, BrokenError) else KeyboardInterrupt):
                    load(tmp_path / "file", model)
            assert fingerprint(model) == before
            load(tmp_path / "file", model)
    assert steps == (3 if plan else 1)


@pytest.mark.parametrize("plan", [True, False], ids=["cut", "whole"])
def test_a_failure_at_any_tensor_changes_nothing(tmp_path, monkeypatch, plan):
    save(cut_net() if plan else Net(), tmp_path / "file")
    original = torch.Tensor.copy_
    count = len(State.of(Net()).groups())
    for last in range(count):
        model, done = Net(), []
        before = fingerprint(model)

        def fail_late(self, *args, done=done, last=last):
            done.append(self)
            if len(done) == last + 1:
                raise BrokenError("no")
            return original(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", fail_late)
            with pytest.raises(sec.FileError, match="cannot be loaded: BrokenError: no"):
                load(tmp_path / "file", model)
        assert len(done) > last
        assert fingerprint(model) == before


class Picky(nn.Module):
    """Its extra state is taken in part, then refused."""

    def __init__(self, value):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen = torch.full((2,), value)

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen.copy_(state)
        self.extra = 3
        if state[0] == 5:
            raise BrokenError("five")


def test_a_set_extra_state_that_fails(tmp_path):
    save(Picky(5.0), tmp_path / "file")
    refuses(tmp_path / "file", "BrokenError: five", Picky(1.0))
    save(Picky(4.0), tmp_path / "file")
    assert load(tmp_path / "file", Picky(1.0)).seen.tolist() == [4.0, 4.0]


def test_tensors_that_take_no_new_values(tmp_path):
    _, path = valid(tmp_path / "file")
    with torch.inference_mode():
        model = Net()
    refuses(path, "cannot be loaded: RuntimeError: Inplace update to inference tensor", model)


def test_a_cut_that_fails_in_the_middle(tmp_path, monkeypatch):
    path = genuine().to(tmp_path / "file")
    model = Net()
    before = fingerprint(model)
    monkeypatch.setattr("secateur.surgery.cut.refresh", lambda _: 1 / 0)
    with pytest.raises(sec.FileError, match="ZeroDivisionError"):
        load(path, model)
    assert fingerprint(model) == before
    monkeypatch.undo()
    with torch.no_grad():
        load(path, model).eval()(IDS)
