"""Models that are spread over ranks by fully_shard and parallelize_module: cut as on one process, and trained on."""

from processes import result, run


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
        assert "sec.apply(model, plan, shard=fn) cuts it" in said["compress"]
        assert "it shards a model in place" in said["not in place"]
        assert "VerifyError: the cut model's output differs" in said["wrong"]
        assert "shard= is the function" in said["plain"]
        assert "plan before it is" in said["data"]
        assert found["same"]
        assert found["trains on"] <= 1e-6
    assert "rank 1 failed: ZeroDivisionError" in result(two[0], "refusals")["said"]["fails"]
