"""Valid files with random damage: refused with the model unchanged, or loaded right."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from crafted import Net, Parts, fingerprint, valid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secateur import FileError, Plan, PlanError
from secateur.io import load
from secateur.io.tensors import State

FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    _, path = valid(tmp_path_factory.mktemp("good") / "file")
    return path.read_bytes(), Parts.of(path)


def attempt(path) -> bool:
    """Load a file of unknown worth; False where it is refused. Anything else that is wrong fails."""
    model = Net()
    before = fingerprint(model)
    refusal = ""
    try:
        load(path, model)
    except FileError as error:
        refusal = str(error)
    if refusal:
        assert str(path) in refusal
        assert len(refusal) < 2000
        assert fingerprint(model) == before
        return False
    held = Parts.of(path)
    for name, tensor in State.of(model).tensors.items():
        if name in held.tensors:
            start, end = held.tensors[name]["data_offsets"]
            got = tensor.detach().contiguous().flatten().view(torch.uint8)
            assert bytes(got.tolist()) == held.data[start:end]
    return True


edits = st.lists(
    st.tuples(
        st.sampled_from(["set", "cut", "insert", "swap"]), st.floats(0, 0.999), st.binary(min_size=1, max_size=9)
    ),
    min_size=1,
    max_size=4,
)


def damaged(data: bytes, changes, focus: int) -> bytes:
    """Bytes with a few changes, all within the first `focus`."""
    out = bytearray(data)
    for kind, where, what in changes:
        at = int(where * min(len(out), focus))
        if kind == "set":
            out[at : at + len(what)] = what
        elif kind == "cut":
            del out[at : at + len(what)]
        elif kind == "insert":
            out[at:at] = what
        else:
            out[at], out[-1 - at] = out[-1 - at], out[at]
    return bytes(out)


@FUZZ
@given(changes=edits, focus=st.sampled_from([10, 200, 4000, 10**9]))
def test_damaged_bytes(good, tmp_path, changes, focus):
    path = tmp_path / "file"
    path.write_bytes(damaged(good[0], changes, focus))
    attempt(path)


def places(data, path=()):
    """The way to every value in JSON data."""
    yield path
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def changed(data, path, how, value):
    """Data with what is at a place removed, repeated or replaced."""
    if not path:
        return value
    data = copy.deepcopy(data)
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    if how == "remove":
        del holder[path[-1]]
    elif how == "repeat" and isinstance(holder, list):
        holder.insert(path[-1], holder[path[-1]])
    else:
        holder[path[-1]] = value
    return data


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 8, 15, 16, 2**31, 2**63, 10**25]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "width", "up.weight", "__class__", "forward", "_parameters", "training", "0", "\ud800"]),
    st.text(max_size=5),
    st.recursive(st.integers(-2, 20), lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=3), s)),
)
how = st.sampled_from(["remove", "repeat", "replace", "replace"])


@FUZZ
@given(picks=st.lists(st.tuples(st.floats(0, 0.999), how, junk), min_size=1, max_size=3))
def test_damaged_json(good, tmp_path, picks):
    _, parts = good
    said = parts.said
    for where, kind, value in picks:
        ways = list(places(said))
        said = changed(said, ways[int(where * len(ways))], kind, value)
    path = tmp_path / "file"
    attempt(replace(parts, said=said).to(path))
    if isinstance(said, dict) and "plan" in said:
        try:
            plan = Plan.from_json(json.dumps(said["plan"]))
        except PlanError:
            return
        assert Plan.from_json(plan.to_json()) == plan
        assert str(plan)


@FUZZ
@given(picks=st.lists(st.tuples(st.floats(0, 0.999), how, junk), min_size=1, max_size=2))
def test_damaged_tensors(good, tmp_path, picks):
    _, parts = good
    tensors = parts.tensors
    for where, kind, value in picks:
        ways = [way for way in places(tensors) if way]
        tensors = changed(tensors, ways[int(where * len(ways))], kind, value)
    attempt(replace(parts, tensors=tensors).to(tmp_path / "file"))


def test_the_fuzzer_sees_both_outcomes(good, tmp_path):
    """Undamaged it loads; a changed weight is a valid file too; a changed header is not."""
    raw, parts = good
    path = tmp_path / "file"
    path.write_bytes(raw)
    assert attempt(path)
    assert attempt(replace(parts, data=bytes(len(parts.data))).to(path))
    path.write_bytes(damaged(raw, [("set", 0.0, b"\xff")], 10))
    assert not attempt(path)
