"""Files that lie about the biases that a model was given."""

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import Parts, refuses
from torch import nn

import secateur as sec
from secateur.io import load, save
from secateur.surgery.bias import ensure_bias


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.norm = nn.LayerNorm(8, bias=False)
        self.down = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


@functools.cache
def given() -> Parts:
    """A file of a cut model with a bias that was added, taken apart."""
    model = Small()
    sec.apply(model, sec.plan(sec.trace(model, torch.zeros(1, 4)), sec.Ratio(0.5)))
    ensure_bias(model, "up")
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder, "file"))
        return Parts.of(Path(folder, "file"))


def said(**changes: Any) -> Parts:
    return given().changed(lambda data: data.update(changes))


def test_it_is_right_before_it_is_changed(tmp_path):
    assert given().said["biases"] == ["up"]
    assert load(given().to(tmp_path / "file"), Small()).up.bias.shape == (4,)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["__class__"], "is no module"),
        (["up.__dict__"], "is no module"),
        (["up.weight"], "is no module"),
        (["up", "forward"], "is no module"),
        (["x" * 10_000], "is no module"),
        ([""], "is a Small"),
        (["norm"], "is a LayerNorm"),
        (["up", "down"], "added to down, which has one"),
        (["up", "up"], "added to up, which has one"),
        ([], r"the model lacks 'up\.bias'"),
        ("up", "its list of added biases is none"),
        ({"up": 1}, "its list of added biases is none"),
        ([["up"]], "its list of added biases is none"),
        (None, "its list of added biases is none"),
    ],
    ids=str,
)
def test_names_that_are_no_layer_without_a_bias(names, words, tmp_path):
    refuses(said(biases=names).to(tmp_path / "file"), words, Small())


def test_a_name_that_a_model_computes(tmp_path):
    """Names are looked up among modules; nothing of the model is called."""

    class Trap(Small):
        @property
        def trap(self) -> nn.Linear:
            raise AssertionError("looked at")

    Trap.__name__ = "Small"
    refuses(said(biases=["trap"]).to(tmp_path / "file"), "is no module", Trap())


def test_a_file_without_the_list_has_none(tmp_path):
    model = Small()
    save(model, tmp_path / "file")
    parts = Parts.of(tmp_path / "file").changed(lambda data: data.pop("biases"))
    loaded = load(parts.to(tmp_path / "file"), Small())
    assert torch.equal(loaded.up.weight, model.up.weight)
    assert loaded.up.bias is None


def test_sizes_that_are_not_those_of_the_layer(tmp_path):
    plan = copy.deepcopy(given().said["plan"])
    plan["tensors"]["up.bias"]["keep"]["0"] = [0, 1]
    refuses(said(plan=plan).to(tmp_path / "file"), "added to up does not have the 4 elements", Small())
    plan["tensors"]["up.bias"]["shape"] = [9]
    refuses(said(plan=plan).to(tmp_path / "file"), r"cuts up\.bias of shape \(9,\), here it is \(8,\)", Small())
    del plan["tensors"]["up.bias"]
    refuses(said(plan=plan).to(tmp_path / "file"), "added to up does not have the 4 elements", Small())
    tensors = copy.deepcopy(given().tensors)
    tensors["up.bias"]["shape"] = [2, 2]
    parts = Parts(tensors, given().said, given().data)
    refuses(parts.to(tmp_path / "file"), r"up\.bias is \[2, 2\] in the file, \[4\] in the model", Small())
