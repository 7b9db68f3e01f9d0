"""Models that are spread over ranks by fully_shard and parallelize_module: cut as on one process, and trained on."""

import pytest
from fsdp import needs_right_training
from processes import result, run


@needs_right_training
def test_two_ranks():
    two = run(2, ["fsdp_net", "fsdp_llama", "tensor_parallel", "refusals", "memory"])
    for rank in two:  # 1.6 times its shards, of which it had one to begin with, and one tensor; 2 MB for all else
        found = result(rank, "memory")
        assert found["beyond"] < 0.6 * found["shards"] + found["largest"] + 2e6
    for name in ("fsdp_net", "fsdp_llama", "tensor_parallel"):
        for rank in two:
            found = result(rank, name)
            assert found["plan"]
            assert found["kinds"]  # tracing leaves the model as it was
            assert found["ties"]
            assert found["sharded"] > 3
            assert "is no longer that of the model" in found["other"]
            assert found["cut"] <= 1e-6
            assert found["out"] <= 1e-5
            assert found["trained"] <= 1e-4  # gradients are added up in another order
            assert found["saved"] == 0
    for rank in two:
        found = result(rank, "refusals")
        said = found["said"]
        assert "sec.apply(model, plan, shard=fn) cuts it" in said["apply"]
        assert "sec.compress(…, shard=fn)" in said["compress"]
        for name in ("recover", "penalty", "sparsify"):
            assert "what takes no shard= is done before that" in said[name], name
        assert "give plan the criterion itself" in said["function"]
        for name in ("flat", "flat trace"):
            assert "shard it with fully_shard (FSDP2) instead, or cut it before" in said[name], name
        assert "PipelineStage" in said["stage"]
        assert "leave out alone()" in said["by itself"]
        assert "it shards a model in place" in said["not in place"]
        assert "the model had or now has more." in said["renames"]
        assert "VerifyError: the cut model's output differs" in said["wrong"]
        assert "shard= is the function" in said["plain"]
        assert found["same"]
        assert found["trains on"] <= 1e-6
        assert rank["refusals"]["seconds"] < 60  # nobody waited
    for name in ("fails", "late", "metric"):
        assert "rank 1 failed: ZeroDivisionError" in result(two[0], "refusals")["said"][name]


def as_one_process(found):
    """Criteria with data, `compress`, refits, on ranks of which each has a part of the data."""
    assert all(found["plans"].values())
    assert found["one plan"]
    assert found["same"] == found["saved"] == 0
    assert found["ties"]
    assert found["outcome"]
    assert found["sharded"] > 3
    assert "is no longer that of the model" in found["other"]
    for name in ("compressed", "out", "refitted"):
        assert found[name] <= 1e-5, name
    for name in ("trained", "state"):
        assert found[name] <= 1e-4, name  # gradients are added up in another order


@needs_right_training
def test_data_on_two_ranks():
    two = run(2, ["data_fsdp", "data_parallel", "other_jobs", "measured_sharded", "killed_sharded"])
    first, second = (result(rank, "measured_sharded") for rank in two)
    assert first == second
    assert first[1]
    assert first[3] == 6
    assert "killed_sharded" not in two[1]
    found = result(two[0], "killed_sharded")
    assert "the process of rank 1 is gone" in found["said"]
    assert found["seconds"] < 20
    assert found["same"]
    for rank in two:
        as_one_process(result(rank, "data_fsdp"))
        as_one_process(result(rank, "data_parallel"))
        found = result(rank, "other_jobs")
        assert found["swept"] <= 1e-5
        assert found["blocks"]
        assert found["dead"]
        assert found["buffer"]
        assert found["state"] <= 1e-4
        assert found["zeros"] == 128
        assert found["sharded"] == 8


@pytest.mark.slow
@needs_right_training
def test_data_with_shared_weights_and_on_four_ranks():
    for world, names in ((2, ["data_tied"]), (4, ["data_fsdp", "data_parallel"])):
        for rank in run(world, names):
            for name in names:
                as_one_process(result(rank, name))
