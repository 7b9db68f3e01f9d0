"""Plans that ask for what no plan may: by themselves, and in a file."""

import base64
import copy
import json

import pytest
import torch
from crafted import Net, fingerprint, genuine, refuses

import secateur as sec
from secateur import PlanError
from secateur.io import load


@pytest.fixture
def data():
    """A plan that is right, as data to be changed."""
    return copy.deepcopy(genuine().said["plan"])


@pytest.fixture
def both(tmp_path):
    """A plan that must be refused when it is read or applied, and when it comes in a file."""

    def check(data, words):
        model = Net()
        before = fingerprint(model)
        with pytest.raises(PlanError, match=words):
            sec.apply(model, sec.Plan.from_json(json.dumps(data)), verify=False)
        assert fingerprint(model) == before
        refuses(genuine().changed(lambda said: said.update(plan=data)).to(tmp_path / "file"), words)

    return check


@pytest.fixture
def unread(tmp_path):
    """Text that must be refused as a plan, and as the JSON of a file that holds it as its plan."""

    def check(text, words):
        with pytest.raises(PlanError, match=words):
            sec.Plan.from_json(text)
        said = json.dumps({**genuine().said, "plan": "PLAN"}).replace('"PLAN"', text)
        refuses(genuine().to(tmp_path / "file", said), words)

    return check


def test_the_plan_is_right_before_it_is_changed(data):
    model = sec.apply(Net(), sec.Plan.from_json(json.dumps(data)), verify=False)
    assert (model.width, model.up.out_features) == (8, 8)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ([0, 1, 16], "keeps position 16 of up.weight dim 0, which has 16"),
        ([2**62], "keeps position"),
        ([-1, 0], "whole numbers from 0 on"),
        ([3, 3], "rising, non-empty"),
        ([3, 2], "rising, non-empty"),
        ([], "rising, non-empty"),
        ([0.0], "whole numbers"),
        ([True], "whole numbers"),
        (["0"], "whole numbers"),
        ([[0]], "whole numbers"),
        ([None], "whole numbers"),
        ([2**63], "below 2"),
        ([10**400], "below 2"),
        (99, "mask 99 says, but has"),
        (-1, "mask -1 says"),
        (10**30, "says, but has"),
        (True, "should be a list"),
        ("0123", "should be a list"),
        ({"0": 1}, "should be a list"),
        (None, "should be a list"),
    ],
)
def test_positions(data, both, index, words):
    data["tensors"]["up.weight"]["keep"]["0"] = index
    both(data, words)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("", "ends? with a byte that keeps"),
        ("AA==", "ends? with a byte that keeps"),
        ("AQA=", "ends? with a byte that keeps"),
        ("AQ", "base64"),
        ("AQ==AQ==", "base64"),
        ("A Q==", "base64"),
        ("ÄQ==", "base64"),
        ("\x00", "base64"),
        ("AAAB", "keeps position 16 of"),
        ("A" * (4 * 2**20) + "AAAB", "for more than 16777216 positions"),
        ("A" * (12 * 2**20), "longer than those of any plan"),
        ([0], "three numbers"),
        ([0, 0], "three numbers"),
        ([0, 0, True], "three numbers"),
        ([0, 0, -1], "three numbers"),
        ([0, [0], 1], "three numbers"),
        ([0, 99, 1], "two of masks before it"),
        ([0, 0, 0], "one after the other"),
        ([0, 0, 10**30], "one after the other"),
        (3, "list of text"),
        (None, "list of text"),
    ],
    ids=lambda item: str(item)[:20],
)
def test_masks(data, both, mask, words):
    data["tensors"]["up.weight"]["keep"]["0"] = len(data["masks"])
    both({**data, "masks": [*data["masks"], mask]}, words)
    both({**data, "masks": mask}, "list of text")


def test_masks_that_grow(data, both):
    """A few characters cannot stand for more positions than any plan has."""
    full = base64.b64encode(b"\xff" * 512).decode()
    both({**data, "masks": [*data["masks"], full, [len(data["masks"])] * 2 + [4096]]}, "more positions than")
    wide = base64.b64encode(b"\x01" + bytes(2**20) + b"\x01").decode()
    both({**data, "masks": [*data["masks"], wide, [len(data["masks"])] * 2 + [2**24 - 1]]}, "more positions than")


@pytest.mark.parametrize("dim", ["-1", "2", "99", "100", "00", "0 ", "", "x", "1.0", "²", "9" * 5000])
def test_dimensions(data, both, dim):
    data["tensors"]["up.weight"]["keep"][dim] = [0]
    both(data, "cuts dimension")


def test_tensors(data, both):
    right = data["tensors"]
    for change, words in (
        ({"nothing.weight": right["up.weight"]}, "cuts nothing.weight, which Net does not have"),
        ({"up.weight": {**right["up.weight"], "shape": [32, 8]}}, "here it is"),
        ({"up.weight": {**right["up.weight"], "shape": [2**70, 8]}}, "below 2"),
        ({"up.weight": {"keep": {"0": [0]}}}, "shape of 'up.weight' should be a list"),
        ({"up.weight": 3}, "'up.weight' should be an object"),
        ({"embed.weight": {"shape": [8, 8], "keep": {"1": [0]}}, "\x1b[2J": 3}, "x1b.2J' should be an object"),
    ):
        both({**data, "tensors": {**right, **change}}, words)
    both({**data, "tensors": []}, "tensors should be an object")


def name(*steps):
    return [{"name": step} for step in steps]


@pytest.mark.parametrize(
    "path",
    [
        name("__class__"),
        name("__dict__", "width"),
        name("__init__", "__globals__"),
        name("forward"),
        name("forward", "limit"),
        name("training"),
        name("flag"),
        name("note"),
        name("kind"),
        name("kind", "limit"),
        name("function"),
        name("function", "width"),
        name("options"),
        name("options", "limit"),
        name("options", "__class__", "limit"),
        name("options", "__dict__"),
        name("offset"),
        name("offset", "requires_grad"),
        name("_parameters"),
        name("_modules"),
        name("up", "out_features"),
        name("call_super_init"),
        name("dump_patches"),
        name("T_destination"),
        name("_version"),
        name("missing"),
        name(""),
        [*name("_modules"), {"key": "up"}, *name("out_features")],
        [*name("_parameters"), {"key": "weight"}],
        [*name("_buffers"), {"key": "running_mean"}],
        [*name("_forward_hooks"), {"key": 0}],
        [*name("others"), {"index": 0}, *name("in_features")],
        [*name("table"), {"index": 3}],
        [*name("table"), {"key": "missing"}],
        [*name("table"), {"key": 2**70}],
        [*name("sizes"), {"key": 1}],
        [*name("sizes"), {"index": -1}],
        [*name("sizes"), {"index": 2}],
        [*name("sizes"), {"index": True}],
        [*name("note"), {"index": 0}],
        [*name("width"), *name("real")],
        [{"name": "width", "key": "width"}],
        [{"call": "width"}],
        [{"name": 3}],
        [{"name": None}],
        [{}],
        ["width"],
        [],
        name(*["options"] * 65),
    ],
    ids=lambda path: json.dumps(path)[:60],
)
def test_attributes_that_no_plan_may_set(data, both, path):
    data["attributes"] = [{"module": "", "path": path, "was": 16, "value": 8}]
    words = "plain value|cannot set|steps lead to|expects|should be an object"
    both(data, words)
    data["attributes"] = []
    data["held"] = [{"module": "", "path": path, "keep": {"0": [0]}}]
    if path not in (name("offset"), name("missing")):  # a cache that the model has not made yet is left out
        both(data, f"{words}|not a tensor")


@pytest.mark.parametrize(
    "path",
    [
        name("options", "width"),
        [*name("table"), {"key": "width"}],
        [*name("table"), {"key": 3}],
        [*name("sizes"), {"index": 1}],
    ],
)
def test_ints_that_the_model_holds_may_be_set(data, path):
    data["attributes"].append({"module": "", "path": path, "was": 16, "value": 8})
    model = sec.apply(Net(), sec.Plan.from_json(json.dumps(data)), verify=False)
    assert [model.options.width, *model.table.values(), model.sizes[1]].count(8) == 1


@pytest.mark.parametrize("dunder", ["__class__", "__dict__", "__x"])
def test_dunders_are_not_even_read(data, dunder):
    data["attributes"][0]["path"] = name(dunder)
    with pytest.raises(PlanError, match="cannot set what the step"):
        sec.Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("owner", ["nothing", "up.weight", "forward", "__class__", "options", ".", "up.", None, 3])
def test_modules_that_there_are_not(data, both, owner):
    data["attributes"] = [{"module": owner, "path": name("in_features"), "was": 8, "value": 4}]
    both(data, "no plain value|module should be str")


def test_values_of_attributes(data, both):
    (right,) = data["attributes"]
    for change, words in (
        ({"was": 15}, "expects width to be 15, here it is 16"),
        ({"was": True}, "was should be int"),
        ({"value": True}, "value should be int"),
        ({"value": 8.0}, "value should be int"),
        ({"value": "8"}, "value should be int"),
        ({"value": None}, "value should be int"),
        ({"value": 2**63}, "beyond"),
        ({"value": -(10**300)}, "beyond"),
    ):
        both({**data, "attributes": [{**right, **change}]}, words)
    both({**data, "attributes": [right, right]}, "names one place twice")
    both({**data, "attributes": right}, "attributes should be a list")


def test_held_tensors(data, both):
    for keep, words in (
        ({"0": [16]}, "keeps position 16 of offset dim 0"),
        ({"1": [0]}, "cuts dimension 1 of offset, which has 1"),
        ({"0": [1, 1]}, "rising"),
        ([], "should be an object"),
    ):
        both({**data, "held": [{"module": "", "path": name("offset"), "keep": keep}]}, words)
    twice = [{"module": "", "path": name("offset"), "keep": {"0": list(range(12))}}] * 2
    both({**data, "held": twice}, "names one place twice")


REMOVED = {"blocks": [], "attributes": [], "lists": []}
PLACE = {"module": "", "path": [{"name": "training"}]}


@pytest.mark.parametrize(
    ("removed", "words"),
    [
        ([], "removed should be an object"),
        ({}, "blocks should be a list"),
        ({**REMOVED, "blocks": [""]}, "should be names, each once"),
        ({**REMOVED, "blocks": ["a", "a"]}, "should be names, each once"),
        ({**REMOVED, "blocks": ["a." + "9" * 5000]}, "should be names, each once"),
        ({**REMOVED, "blocks": ["a.1"], "lists": None}, "lists should be a list"),
        ({**REMOVED, "blocks": ["nowhere.1"]}, "does not have"),
        ({**REMOVED, "blocks": ["up"]}, "no entry of"),
        ({**REMOVED, "blocks": ["a.1"], "lists": [{**PLACE, "keep": [3, 1]}]}, "rising"),
        ({**REMOVED, "blocks": ["a.1"], "attributes": [{**PLACE, "was": 1, "value": "2"}]}, "value should be int"),
    ],
)
def test_blocks_that_go(data, both, removed, words):
    both({**data, "secateur_plan": 3, "removed": removed}, words)


@pytest.mark.parametrize("factored", ["up", [""], ["a", "a"], [3], {}])
def test_layers_that_become_two(data, both, factored):
    both({**data, "secateur_plan": 4, "factored": factored}, "factored should be")


def test_axes_and_costs(data, both):
    (right, *_) = data["axes"]
    for change, words in (
        ({"keep": [0, right["size"]]}, "which has"),
        ({"keep": [1, 0]}, "rising"),
        ({"keep": []}, "rising"),
        ({"size": -5}, "which has -5"),
        ({"size": 10**50}, "beyond"),
        ({"name": 3}, "name should be str"),
        ({"exact": 1}, "exact should be bool"),
        ({"macs": 1.5}, "macs should be int"),
    ):
        both({**data, "axes": [{**right, **change}]}, words)
    for cost in ("macs", "params", "bytes"):
        for value in (None, [1], [1, 2, 3], [1, -2], [1, 1e300], "12"):
            both({**data, cost: value}, cost)


def test_versions(data, both, tmp_path):
    for version in (0, 5, -1, 10**30, True, "1", 1.0, None):
        both({**data, "secateur_plan": version}, "version|secateur_plan")
        changed = genuine().changed(lambda said, v=version: said.update(version=v, library="9.9"))
        refuses(changed.to(tmp_path / "file"), "it has layout .* reads 1; load it with what wrote it, version '9.9'")


@pytest.mark.parametrize("entry", ["version", "library", "class", "plan", "tied"])
def test_entries_that_are_missing(tmp_path, entry):
    refuses(genuine().changed(lambda said: said.pop(entry)).to(tmp_path / "file"), "not that of a model")


@pytest.mark.parametrize("text", ["", "[]", "3", "null", '"x"', "{}", "{", "\x00", "nan", "{'a': 1}", "\ufeff{}"])
def test_metadata_that_is_something_else(tmp_path, text):
    refuses(genuine().to(tmp_path / "file", text), "metadata")
    with pytest.raises(PlanError):
        sec.Plan.from_json(text)


@pytest.mark.parametrize("junk", [None, 3, object(), ["{}"], b"\xff\xfe{", bytearray(b"{}")])
def test_what_is_no_text(junk):
    with pytest.raises(PlanError):
        sec.Plan.from_json(junk)


def test_json_bombs(data, unread):
    text = json.dumps(data)
    unread("[" * 100_000 + "]" * 100_000, "nested too deeply")
    unread('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply")
    unread("[" * 50_000_000, "more lists and objects than any plan")
    unread("[" + "[]," * 5_000_000 + "[]]", "more lists and objects than any plan")
    unread("9" * 10_000, "integer|digits")
    for constant in ("NaN", "Infinity", "-Infinity"):
        unread(text.replace('"value": 8', f'"value": {constant}'), f"{constant} is not a number")
    unread(text.replace('"axes":', '"axes": [], "axes":'), "the same key twice")
    unread(text.replace('"0": ', '"0": [0], "0": ', 1), "the same key twice")
    unread(text.replace('"value": 8', '"value": 1e400'), "value should be int")


def test_text_that_is_too_long(unread):
    unread(" " * (64 * 2**20 + 1), "more than any plan has")


def tensor(*shape, **more):
    return {"tensor": list(shape), "dtype": "float32", **more}


@pytest.mark.parametrize(
    "example",
    [
        tensor(2**50),
        tensor(2**20, 2**20, 2**20),
        tensor(2**26, 0, 2**62),
        tensor(2**27 + 1),
        {"tuple": [tensor(2**27)] * 1000},
        {"dict": {"x": {"list": [tensor(2**26), tensor(2**26), tensor(1)]}}},
        tensor(*[1] * 65),
        tensor(-1),
        tensor(True),
        tensor(1.5),
        tensor("x"),
        tensor(2, dtype="Tensor"),
        tensor(2, dtype="__doc__"),
        tensor(2, dtype="_dynamo"),
        tensor(2, dtype=None),
        tensor(2, dtype="qint8"),
        tensor(2, dtype="int64", low=10**30),
        tensor(2, dtype="int64", low=3, high=2),
        tensor(2, dtype="int64", high=2**63 - 1),
        tensor(2, dtype="int64", low="1", high="2"),
        tensor(2, dtype="int64", low=[], high={}),
        {"tensor": 3, "dtype": "float32"},
        {"tensor": {}},
        {"dict": []},
        {"tuple": {}},
        {"list": 3},
        {"value": []},
        {"value": {"a": 1}},
        {"value": 10**30},
        {"other": 1},
        {},
        [],
        3,
        "x",
    ],
    ids=lambda example: json.dumps(example)[:50],
)
def test_examples(data, both, monkeypatch, example):
    """Refused by what the recipe says: no tensor of more than a few elements is made."""
    originals = {name: getattr(torch, name) for name in ("randn", "randint")}
    for name, original in originals.items():

        def small(*args, original=original, **kwargs):
            made = original(*args, **kwargs)
            assert made.numel() < 10
            return made

        monkeypatch.setattr(torch, name, small)
    data["example"] = example
    both(data, "example|not a plan")


def test_an_example_that_is_right(data):
    data["example"] = {"tuple": [tensor(4), {"value": None}, {"dict": {"n": tensor(2, dtype="int64", high=5)}}]}
    floats, nothing, named = sec.Plan.from_json(json.dumps(data)).example
    assert floats.shape == (4,)
    assert nothing is None
    assert named["n"].max() <= 5


def test_a_plan_for_another_model(tmp_path):
    class Other(Net):
        def __init__(self):
            super().__init__()
            self.width = 4

    Other.__name__ = "Net"
    refuses(genuine().to(tmp_path / "file"), "expects width to be 16, here it is 4", Other())


def test_sizes_that_contradict_each_other(data, tmp_path):
    """A plan that fits but whose weights are not those in the file."""
    del data["tensors"]["down.weight"]
    refuses(
        genuine().changed(lambda said: said.update(plan=data)).to(tmp_path / "file"),
        r"down\.weight is \[4, 8\] in the file, \[8, 16\]",
    )
    model = load(genuine().to(tmp_path / "file"), Net())
    assert model.down.in_features == 8
