"""Distributed checkpoints: saved on two ranks, loaded on four and on one, with the plan and what no state dict has."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp import needs_right_training
from processes import result, run
from safetensors.torch import load_file

import secateur as sec


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECATEUR_JOBS_FOLDER", str(made))
        found = run(2, ["save_parts", "load_parts", "parts_that_fail", "part_missing"])
        for name, files in result(found[0], "save_parts").items():
            assert files[0] == "secateur-model.json", name
            assert [file[:11] for file in files[1:]] == ["shard-00001", "shard-00002"]  # and no pickle
        yield made, found


def as_saved(found, job="load_parts"):
    for rank in found:
        for name, one in result(rank, job).items():
            assert one["weights"] == 0, name
            assert one["buffers"] == 0, name
            assert one["out"] <= 1e-5, name
            assert one["sharded"] > 3, name
            assert one["ties"], name
            assert one["trained"] <= 1e-5, name
            assert one["again"] == 0, name


@needs_right_training
def test_two_ranks(folder):
    as_saved(folder[1])


@needs_right_training
def test_four_ranks(folder, monkeypatch):
    monkeypatch.setenv("SECATEUR_JOBS_FOLDER", str(folder[0]))
    as_saved(run(4, ["load_few_parts"]), "load_few_parts")


def test_one_process(folder):
    """Without a process group: into a model, into none, by torch's own reader."""
    from sharding import IDS, llama, net

    for name, make in (("net", net), ("llama", lambda: llama(tie_word_embeddings=True))):
        want = load_file(folder[0] / f"{name}.safetensors")
        state = sec.load(folder[0] / name, make()).state_dict()
        assert all(torch.equal(state[key], value) for key, value in want.items() if key in state)
        assert len(want.keys() & state.keys()) > 3
        read = {key: torch.empty_like(value) for key, value in want.items()}
        dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(folder[0] / name)), no_dist=True)
        assert all(torch.equal(read[key], value) for key, value in want.items())
    whole, again = sec.load(folder[0] / "llama.safetensors"), sec.load(folder[0] / "llama")
    assert torch.equal(whole(**IDS).logits, again(**IDS).logits)


def test_what_fails_on_one_rank_fails_on_all(folder):
    for number, rank in enumerate(folder[1]):
        said = result(rank, "parts_that_fail")
        assert "No space left on device" in said["full"]
        assert said["left"] == []
        assert "there is something already" in said["taken"]
        assert "nowhere" in said["lacks"]
        assert "ZeroDivisionError" in said["fails"]
        assert "left no parameter spread over ranks" in said["plain"]
        assert "the model is a Mlp" in said["other"]
        assert said["same"]
        assert said["then"] == 0
        assert rank["parts_that_fail"]["seconds"] < 20
        assert "a folder that all ranks share" in result(rank, "part_missing") or number == 0
