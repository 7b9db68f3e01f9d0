"""`secateur show` and `secateur diff`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import Command
from safetensors.torch import load_file, save_file
from torch import nn

import secateur as sec
from secateur.cli.exits import Exit


@pytest.fixture
def pruned(command: Command) -> Command:
    for out, ratio, more in (("a", "0.5", []), ("b", "0.75", []), ("c", "0.5", ["--importance", "random"])):
        assert command("prune", "net.py:pair", "--ratio", ratio, "--out", out, "-q", *more).code == Exit.DONE
    return command


def test_show_a_model(pruned: Command) -> None:
    said = json.loads(pruned("show", "a/model.safetensors", "--json").out)
    assert (said["kind"], said["class"]) == ("model", "Sequential")
    assert said["tensors"]["0.weight"] == {"dtype": "F32", "shape": [8, 4]}
    assert [(axis["size"], axis["kept"]) for axis in said["plan"]["axes"]] == [(16, 8), (8, 4)]
    lines = pruned("show", "a/model.safetensors").out.splitlines()
    assert "a Sequential, cut on 2 axes" in lines[0]
    assert ["0", "features", "16", "8", "exact"] in [line.split() for line in lines]


def test_show_a_plan_of_any_length(pruned: Command) -> None:
    """Plans and models are told apart by what is in them, whatever the first byte of a header's length is."""
    said = json.loads(pruned("show", "a/plan.json", "--json").out)
    assert (said["kind"], said["class"], said["tensors"]) == ("plan", None, None)
    plain = load_file("a/model.safetensors")
    kinds = set()
    for i in range(300):
        save_file({**plain, "x" * (i + 1): torch.ones(1)}, "some.safetensors")
        kinds.add(Path("some.safetensors").read_bytes()[0])
        if kinds & {ord("{"), ord("["), ord(" ")}:
            assert json.loads(pruned("show", "some.safetensors", "--json").out)["kind"] == "weights"
            kinds.clear()


def test_show_weights_and_models_that_were_never_cut(command: Command) -> None:
    save_file({"w": torch.ones(2, 3)}, "weights.safetensors")
    ended = command("show", "weights.safetensors")
    assert "weights without a plan, 1 tensors, 6 numbers" in ended.out
    assert ["w", "2×3", "F32"] in [line.split() for line in ended.out.splitlines()]
    sec.save(nn.Linear(2, 2), "whole.safetensors")
    assert "a Linear, never cut" in command("show", "whole.safetensors").out


def test_show_attributes(command: Command) -> None:
    Path("attention.py").write_text(
        "import torch\nbuild = lambda: (torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),"
        " torch.ones(1, 3, 16))\n"
    )
    assert command("prune", "attention.py:build", "--ratio", "0.5", "--out", "out", "-q").code == Exit.DONE
    said = json.loads(command("show", "out/plan.json", "--json").out)["plan"]["attributes"]
    shown = [line.split() for line in command("show", "out/plan.json").out.splitlines()]
    assert {"place": "self_attn.num_heads", "was": 4, "value": 2} in said
    assert ["self_attn.num_heads", "4", "2"] in shown


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nothing", None, "there is no such file"),
        ("empty", b"", "empty"),
        ("text", b"hello, this is no model at all", "text"),
        ("plan", b'{"secateur_plan": 99, "axes": []}', "a plan of version 99"),
        ("json", b'{"a": 1, "b": 2, "c": 3}', "this is not a plan"),
        ("bytes", b"{" + bytes(range(128, 255)), "bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_show_what_is_no_model(command: Command, name: str, content: bytes | None, words: str) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    ended = command("show", name)
    assert ended.code == (Exit.USAGE if content is None else Exit.INPUT)
    assert words in ended.error


def test_no_difference(pruned: Command) -> None:
    for first, second in (("a/plan.json", "a/plan.json"), ("a/plan.json", "a/model.safetensors")):
        ended = pruned("diff", first, second)
        assert (ended.code, ended.out) == (Exit.DONE, "no difference\n")
    assert json.loads(pruned("diff", "a/plan.json", "a/plan.json", "--json").out)["same"]


def test_different_counts(pruned: Command) -> None:
    ended = pruned("diff", "a/plan.json", "b/plan.json")
    assert ended.code == Exit.DIFFERENT
    rows = [line.split() for line in ended.out.splitlines()]
    assert ["0", "features", "16", "8", "4", "4"] in rows  # the four best are among the eight best
    assert ["2", "features", "8", "4", "2", "2"] in rows


def test_different_positions(pruned: Command) -> None:
    said = json.loads(pruned("diff", "a/model.safetensors", "c/model.safetensors", "--json").out)
    first, second = (sec.Plan.from_json(Path(name, "plan.json").read_text()) for name in "ac")
    common = [len({*a.keep} & {*c.keep}) for a, c in zip(first.axes, second.axes, strict=True) if a.keep != c.keep]
    assert [axis["common"] for axis in said["axes"]] == common
    assert not said["costs"]
    assert "0.weight" in said["weights"]


def test_different_weights_and_classes(pruned: Command) -> None:
    sec.save(nn.Linear(2, 2), "one.safetensors")
    sec.save(nn.Linear(2, 2), "two.safetensors")
    ended = pruned("diff", "one.safetensors", "two.safetensors")
    assert ended.code == Exit.DIFFERENT
    assert "other weights: bias, weight (2 tensors)" in ended.out
    ended = pruned("diff", "one.safetensors", "a/model.safetensors")
    assert "A is a Linear, B a Sequential" in ended.out


def test_one_axis_left_whole(pruned: Command) -> None:
    assert pruned("prune", "net.py:pair", "--ratio", "0.5", "--protect", "2 features", "--out", "d").code == Exit.DONE
    rows = [line.split() for line in pruned("diff", "a/plan.json", "d/plan.json").out.splitlines()]
    assert ["2", "features", "8", "4", "whole", "4"] in rows
    assert not any(row[:2] == ["0", "features"] for row in rows)


def test_diff_refuses_weights_without_a_plan(pruned: Command) -> None:
    save_file({"w": torch.ones(2, 3)}, "weights.safetensors")
    ended = pruned("diff", "a/plan.json", "weights.safetensors")
    assert ended.code == Exit.INPUT
    assert "holds weights without a plan" in ended.error
