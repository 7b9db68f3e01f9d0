"""Checkpoints: what a run can be taken up from, what is refused, and what stays on disk."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from schedule_models import Conv, accuracy, digest, digits, mlp, train
from torch import nn

import secateur as sec
from secateur.schedule import cubic, cut, iterate, linear

X, Y = digits(64)
TARGET = sec.Macs(0.4)


def run(model, folder, target=TARGET, **keywords):
    keywords = {
        "fit": lambda m: train(m, X, Y),
        "evaluate": lambda m: accuracy(m, X, Y),
        "schedule": linear(2),
        "example": X[:1],
        "checkpoint": folder,
    } | keywords
    return iterate(model, keywords.pop("example"), target, **keywords)


def stop_at(last):
    """A fit that does not come through that round."""

    def fit(model, step):
        if step == last:
            raise KeyboardInterrupt
        train(model, X, Y)

    return fit


@pytest.mark.parametrize(
    ("make", "last"), [(mlp, 1), (mlp, 2), (Conv, 1), pytest.param(Conv, 2, marks=pytest.mark.slow)]
)
def test_a_run_is_taken_up_where_it_was(tmp_path, make, last):
    torch.manual_seed(0)
    model = make()
    whole = run(model, None)
    torch.manual_seed(0)
    first = make()
    with pytest.raises(KeyboardInterrupt):
        run(first, tmp_path, fit=stop_at(last))
    state = json.loads((tmp_path / "state.json").read_text())
    assert len(state["rounds"]) == last
    torch.manual_seed(0)
    second, steps = make(), []
    torch.manual_seed(77)  # is put back to what it was

    def fit(m, step):
        steps.append(step)
        train(m, X, Y)

    assert run(second, tmp_path, fit=fit) == whole
    assert steps == [1, 2][last - 1 :]
    assert digest(second) == digest(model)


def test_a_run_that_has_ended_is_not_run_again(tmp_path):
    model, again = mlp(), mlp()
    found = run(model, tmp_path)
    drawn = torch.rand(3)
    same = run(again, tmp_path, fit=None.__eq__, evaluate=pytest.fail)
    assert same == found
    assert [r.seconds for r in same.rounds] == [r.seconds for r in found.rounds]
    assert digest(again) == digest(model)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("metrics", [(0.9, 0.1), (0.9, 0.8, math.nan), (math.inf, math.inf, -math.inf)], ids=str)
def test_a_run_that_stepped_back_stays_there(tmp_path, metrics):
    values = iter([metrics[0], *(value for metric in metrics[1:] for value in (-math.inf, metric))])
    model, again = mlp(), mlp()
    found = run(model, tmp_path, evaluate=lambda m: next(values), floor=0.5)
    assert found.best.number == len(metrics) - 2
    same = run(again, tmp_path, evaluate=pytest.fail, floor=0.5)
    assert str(same) == str(found)  # NaN is not equal to itself
    assert digest(again) == digest(model)
    assert [p.name for p in tmp_path.glob("round*")] == ["round-001.safetensors"] * found.best.number


def test_only_the_best_model_and_the_state_are_on_disk_and_none_is_a_pickle(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(KeyboardInterrupt):
        run(mlp(), tmp_path, fit=stop_at(1))
    (tmp_path / "round-001.safetensors").write_text("of a run that was killed")
    (tmp_path / ".secateur-0123456789abcdef.tmp").write_text("of a run that was killed")
    model = mlp()
    run(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "round-002.safetensors", "state.json"]
    assert digest(sec.load(tmp_path / "round-002.safetensors", mlp())) == digest(model)
    state = json.loads((tmp_path / "state.json").read_text())
    assert [r["number"] for r in state["rounds"]] == [0, 1, 2]


def test_the_models_of_somebody_else_are_left_alone(tmp_path):
    (tmp_path / "round-1.safetensors").write_text("mine")
    with pytest.raises(sec.FileError, match=r"round-1\.safetensors is, which a new run would replace; give another"):
        run(mlp(), tmp_path, evaluate=pytest.fail)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


def test_a_folder_is_made(tmp_path):
    run(mlp(), tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "state.json").exists()
    with pytest.raises(sec.FileError, match="exists"):
        run(mlp(), tmp_path / "a" / "b" / "state.json")


class Other(nn.Sequential):
    pass


OTHERS = {
    "class": ({"model": lambda: Other(*mlp())}, "begun with a Sequential, this model is a Other"),
    "weights": ({"model": lambda: mlp(seed=1)}, "begun with other weights"),
    "width": ({"model": lambda: mlp(17)}, "begun with other weights"),
    "dtype": ({"model": lambda: mlp().double(), "example": X[:1].double()}, "begun with other weights"),
    "target": ({"target": sec.Macs(0.5)}, r"the target Macs\(0.4\), this one is Macs\(0.5\)"),
    "kind": ({"target": sec.Params(0.4)}, r"this one is Params\(0.4\)"),
    "schedule": ({"schedule": cubic(2)}, r"the schedule \[0.5, 1.0\], this one is \[0.875, 1.0\]"),
    "floor": ({"floor": 0.1}, "the floor None, this one is 0.1"),
    "example": ({"example": X[:2]}, "an example that takes 1440 MACs, this one takes 2880"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_checkpoint_of_another_task_is_refused(tmp_path, other):
    with pytest.raises(KeyboardInterrupt):
        run(mlp(), tmp_path, fit=stop_at(2))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    keywords, words = OTHERS[other]
    model = keywords.get("model", mlp)()
    weights, drawn = digest(model), torch.get_rng_state()
    with pytest.raises(
        sec.FileError, match=f"state.json: it was {'' if 'begun' in words else '.*'}{words}.*another folder"
    ):
        run(model, tmp_path, fit=pytest.fail, **{k: v for k, v in keywords.items() if k != "model"})
    assert digest(model) == weights
    assert torch.equal(torch.get_rng_state(), drawn)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_an_address_in_the_name_of_a_target_makes_it_no_other(tmp_path):
    class Mine:
        def choose(self, problem):
            return sec.Ratio(0.5).choose(problem)

    found = run(mlp(), tmp_path, Mine(), schedule=linear(1))
    assert run(mlp(), tmp_path, Mine(), schedule=linear(1), evaluate=pytest.fail) == found


def test_a_model_that_is_cut_already_has_no_checkpoint(tmp_path):
    model = mlp()
    run(model, None)
    before = digest(model)
    with pytest.raises(sec.SecateurError, match=r"cut already.*go on without checkpoint="):
        run(model, tmp_path)
    assert digest(model) == before
    run(model, None, sec.Macs(0.9))


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> Path:
    """The checkpoint of a run that was stopped in its second round."""
    folder = tmp_path_factory.mktemp("left")
    with pytest.raises(KeyboardInterrupt):
        run(mlp(), folder, fit=stop_at(2))
    return folder


def changed(**fields):
    return lambda text: json.dumps(json.loads(text) | fields)


def in_round(**fields):
    def change(text):
        data = json.loads(text)
        data["rounds"][1] |= fields
        return json.dumps(data)

    return change


DAMAGE = {
    "empty": (lambda text: "", "state.json"),
    "half": (lambda text: text[: len(text) // 2], "state.json"),
    "a list": (lambda text: "[]", "no checkpoint that this library can read"),
    "another version": (changed(secateur_iterate=99), "no checkpoint that this library can read"),
    "no task": (changed(task=None), "it was begun with a None"),
    "no rounds": (changed(rounds=[]), "not those of its schedule"),
    "more rounds": (lambda text: text.replace('"rounds": [', '"rounds": [' + "{}, " * 3), "list of rounds is none"),
    "another part": (in_round(part=0.7), "not those of its schedule"),
    "rounds that are none": (changed(rounds={"a": 1}), "list of rounds is none"),
    "rounds of text": (changed(rounds=["a"]), "list of rounds is none"),
    "a number as rounds": (changed(rounds=3), "list of rounds is none"),
    "a round with more": (in_round(evil="x"), "list of rounds is none"),
    "a round that is a path": (in_round(number="../../x"), "list of rounds is none"),
    "a round numbered wrong": (in_round(number=7), "not those of its schedule"),
    "no random state": (changed(random=None), "random generators"),
    "a short random state": (changed(random={"torch": "AAAA", "numpy": [], "python": []}), "random generators"),
    "half a random state": (
        lambda text: json.dumps(
            json.loads(text) | {"random": {**json.loads(text)["random"], "python": [3, [1], None]}}
        ),
        "random generators",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_refused(tmp_path, left, damage):
    folder = shutil.copytree(left, tmp_path / "run")
    change, words = DAMAGE[damage]
    (folder / "state.json").write_text(change((folder / "state.json").read_text()))
    refuse(folder, words)


@pytest.mark.parametrize("damage", ["gone", "half", "of another model"])
def test_a_damaged_model_is_refused(tmp_path, left, damage):
    folder = shutil.copytree(left, tmp_path / "run")
    file = folder / "round-001.safetensors"
    if damage == "gone":
        file.unlink()
    elif damage == "half":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        sec.save(Conv(), file)
    refuse(folder, "round-001.safetensors")


def refuse(folder, words):
    model = mlp()
    before, drawn = digest(model), torch.get_rng_state()
    with pytest.raises(sec.FileError, match=words):
        run(model, folder, fit=pytest.fail, evaluate=pytest.fail)
    assert digest(model) == before
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("moment", ["secateur.schedule.checkpoint.save", "pathlib.Path.write_text"])
def test_a_disk_that_is_full_leaves_the_round_before(tmp_path, monkeypatch, moment):
    model, complete = mlp(), []

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    def cutting(m, example, target):
        complete.append(digest(m))
        if len(complete) == 2:
            monkeypatch.setattr(moment, fail)
        cut(m, example, target)

    with pytest.raises((sec.FileError, OSError), match="No space left"):
        run(model, tmp_path, cut=cutting)
    assert digest(model) == complete[1]
    monkeypatch.undo()
    whole = mlp()
    run(whole, None)
    again = mlp()
    run(again, tmp_path)
    assert digest(again) == digest(whole)
