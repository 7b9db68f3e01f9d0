"""Plans as JSON: what is written is what is read, the same on every machine."""

import base64
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import secateur as sec
from secateur.planning import AxisPlan, Change, Plan
from secateur.planning.example_recipe import made, recipe
from secateur.state.held import Key, Place

kept = st.sets(st.integers(0, 40), min_size=1).map(lambda s: tuple(sorted(s)))
dims = st.dictionaries(st.integers(0, 3), kept, max_size=2)
steps = st.one_of(
    st.sampled_from(["width", "_heads", "config"]), st.integers(0, 3), st.builds(Key, st.text() | st.integers(0, 9))
)
whole = st.builds(Place, st.text(max_size=5), st.lists(steps, min_size=1, max_size=4).map(tuple))
changes = st.builds(Change, st.integers(0, 2**60), st.integers(0, 2**60))
axes = st.builds(AxisPlan, st.text(max_size=9), st.just(41), kept, st.booleans(), st.integers(0, 9), st.integers(0, 9))


@st.composite
def plans(draw):
    tensors = draw(st.dictionaries(st.text(max_size=5), dims, max_size=3))
    return Plan(
        axes=tuple(draw(st.lists(axes, max_size=2))),
        kept=tensors,
        shapes=dict.fromkeys(tensors, (41,) * 4),
        attributes=tuple(
            (place, was, was // 2)
            for place, was in draw(st.dictionaries(whole, st.integers(0, 99), max_size=3)).items()
        ),
        kept_in_attributes=tuple(draw(st.dictionaries(whole, dims, max_size=2)).items()),
        macs=draw(changes),
        params=draw(changes),
        bytes=draw(changes),
    )


@given(plan=plans())
def test_any_plan_comes_back(plan):
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    assert Plan.from_json(text.encode()) == plan


def small_plan() -> Plan:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Ratio(0.5), importance=sec.Random(0))


def test_what_is_written():
    data = json.loads(small_plan().to_json())
    assert data["secateur_plan"] == 2
    assert set(data["tensors"]) == {"0.weight", "0.bias", "2.weight"}
    assert data["tensors"]["2.weight"]["shape"] == [2, 8]
    (keep,) = data["tensors"]["2.weight"]["keep"].values()
    assert keep == data["axes"][0]["keep"] == 0
    (mask,) = base64.b64decode(data["masks"][0])
    assert [position for position in range(8) if mask >> position & 1] == list(small_plan().axes[0].keep)
    assert data["example"] == {"tensor": [1, 4], "dtype": "float32"}


def as_version_1(text: str) -> str:
    """A plan as it was written before there were masks."""
    data = json.loads(text)
    lists = []
    for mask in data.pop("masks"):
        if isinstance(mask, list):
            copies, within, step = mask
            lists.append([copy * step + position for copy in lists[copies] for position in lists[within]])
            continue
        raw = base64.b64decode(mask)
        lists.append([i for i in range(8 * len(raw)) if raw[i // 8] >> i % 8 & 1])
    for item in (*data["axes"], *data["tensors"].values(), *data["held"]):
        keep = item["keep"]
        item["keep"] = {dim: lists[n] for dim, n in keep.items()} if isinstance(keep, dict) else lists[keep]
    return json.dumps({**data, "secateur_plan": 1})


@given(plan=plans())
def test_the_form_without_masks_is_still_read(plan):
    assert Plan.from_json(as_version_1(plan.to_json())) == plan


def test_a_long_list_is_written_once():
    index = tuple(range(0, 20_000, 3))
    layers = {f"layers.{i}.weight": {0: index, 1: tuple(range(1, 20_000, 3))} for i in range(200)}
    plan = Plan((AxisPlan("hidden", 20_000, index, True),), layers, dict.fromkeys(layers, (20_000, 20_000)), ())
    text = plan.to_json()
    assert len(text) < 200 * 70 + 2 * 20_000 / 6 + 1000
    back = Plan.from_json(text)
    assert back == plan
    assert len({id(kept) for dims in back.kept.values() for kept in dims.values()}) == 2


@pytest.mark.parametrize(
    ("copies", "within", "step", "most"),
    [((0, 3, 5, 90), (1, 2, 150), 192, 80), ((0, 1), (2, 3, 7, 80), 2048, 80), ((0, 1, 2), (0, 1), 400, 60)],
    ids=["heads", "two halves", "few"],
)
def test_what_a_list_repeats_is_written_once(copies, within, step, most):
    index = tuple(copy * step + position for copy in copies for position in within)
    plan = Plan((), {"w": {0: index, 1: within}}, {"w": (20_000, 200)}, ())
    masks = json.loads(plan.to_json())["masks"]
    assert len(json.dumps(masks)) < most
    assert masks[-1][2] == step
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(as_version_1(plan.to_json())) == plan


@given(index=st.sets(st.integers(0, 3000), min_size=1, max_size=40), step=st.integers(1, 4000), times=st.integers(1, 4))
def test_lists_that_repeat_come_back(index, step, times):
    index = tuple(sorted({n + step * time for n in index for time in range(times)}))
    plan = Plan((), {"w": {0: index}}, {"w": (20_000,)}, ())
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("index", [(2**24,), (0, 2**40)])
def test_positions_beyond_a_mask_are_written_as_a_list(index):
    plan = Plan((), {"w": {0: index}}, {"w": (2**41,)}, ())
    data = json.loads(plan.to_json())
    assert data["masks"] == []
    assert data["tensors"]["w"]["keep"] == {"0": list(index)}
    assert Plan.from_json(plan.to_json()) == plan


def test_a_read_plan_can_be_applied_and_verified():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    sec.apply(net, Plan.from_json(small_plan().to_json()))
    assert net[2].in_features == 4


def test_the_same_text_in_another_process():
    code = (
        "import torch, secateur as sec\n"
        "torch.manual_seed(0)\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))\n"
        "graph = sec.trace(net, torch.zeros(1, 4))\n"
        "print(sec.plan(graph, sec.Ratio(0.5), importance=sec.Random(0)).to_json(), end='')\n"
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert other.stdout == small_plan().to_json()


def test_a_key_that_json_lacks_is_refused_by_name():
    place = Place("block", ("table", Key((1, 2))))
    plan = Plan((), {}, {}, ((place, 8, 4),))
    with pytest.raises(sec.PlanError, match=r"block\.table.* key of type tuple"):
        plan.to_json()
    for key in (True, 1.5, None):
        with pytest.raises(sec.PlanError, match=f"key of type {type(key).__name__}"):
            Plan((), {}, {}, ((Place("", ("t", Key(key))), 8, 4),)).to_json()


@pytest.mark.parametrize(
    "example",
    [
        torch.randn(2, 3),
        torch.tensor([[3, 9]]),
        torch.tensor([2**63 - 1]),
        torch.tensor([True, False]),
        torch.arange(3).to(torch.uint16),
        torch.randn(2, dtype=torch.float64),
        torch.randn(2).to(torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor(1.0),
        (torch.randn(2), {"mask": torch.ones(1, dtype=torch.int64), "scale": 0.5, "n": 3, "name": "x", "none": None}),
        [torch.randn(1), [True, ()]],
        {},
    ],
)
def test_an_example_is_made_anew_in_its_likeness(example):
    def same(a, b):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if not a.is_floating_point() and a.numel():
                assert b.long().min() >= min(int(a.long().min()), 2**63 - 2)
                assert b.long().max() <= a.long().max()
        elif isinstance(a, dict):
            assert list(a) == list(b)
            for key in a:
                same(a[key], b[key])
        elif isinstance(a, tuple | list):
            for x, y in zip(a, b, strict=True):
                same(x, y)
        else:
            assert a == b

    how = json.loads(json.dumps(recipe(example)))
    same(example, made(how))
    again = made(how)
    if isinstance(example, torch.Tensor):
        assert torch.equal(made(how), again)


@pytest.mark.parametrize(
    "example",
    [
        object(),
        {"x": torch.ones(1), "cache": object()},
        {3: torch.ones(1)},
        (float("nan"),),
        float("inf"),
        2**70,
        torch.empty(2**28, device="meta"),
    ],
)
def test_an_example_without_a_recipe_is_left_out(example):
    assert recipe(example) is None
    plan = Plan((), {}, {}, (), example=example)
    assert Plan.from_json(plan.to_json()).example is None
