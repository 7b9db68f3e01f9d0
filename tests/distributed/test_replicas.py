"""A model that every rank has: one plan, one result, and an error on one rank is an error on all.

Starting processes takes longer than what they do, so each test starts them once and looks at many things.
"""

import pytest
from processes import result, run

TWO = ["plan_from_data", "compress", "refit", "routed", "other_plans", "bad_batch", "data_that_raises"]
TWO += ["proof_that_fails", "other_calls", "measured", "measured_on_one_rank_fails", "factor_fails"]
TWO += ["one_rank_alone", "ddp", "ddp_compressed", "iterate", "iterate_killed"]


def results(found, name):
    return [result(rank, name) for rank in found]


def test_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("SECATEUR_JOBS_FOLDER", str(tmp_path))
    two = run(2, TWO)
    the_data_of_all_ranks_makes_the_plan_of_one_process(two)
    plans_that_differ_and_errors_are_raised_on_every_rank(two)
    times_are_those_of_rank_0(two)
    ddp_synchronises_or_refuses(two)
    rounds_go_on_after_a_rank_was_killed(two, tmp_path)


def the_data_of_all_ranks_makes_the_plan_of_one_process(two):
    for found in results(two, "plan_from_data"):
        assert all(alike for alike, _ in found.values()), found
    assert any(not found["Activation"][1] for found in results(two, "plan_from_data"))  # its own data is not enough
    for name in ("compress", "refit", "routed"):
        as_one_process(results(two, name))
    assert results(two, "one_rank_alone") == [True, False]


def as_one_process(found):
    """The same plan, weights to rounding, the same bits on all ranks; each ran its own batches, and the first."""
    for each in found:
        assert each["plan"]
        assert each["off"] < 1e-5
        assert each["own"]
    assert len({each["digest"] for each in found}) == 1


def plans_that_differ_and_errors_are_raised_on_every_rank(two):
    for said in results(two, "other_plans"):
        assert "rank 1 has another plan than rank 0" in said
    for name, told, own in (
        ("bad_batch", "batch", "batch"),
        (
            "data_that_raises",
            "rank 1 failed: CalibrationError: compress: batch 2 could not be read: OSError",
            "the disk of this rank is gone",
        ),
        ("proof_that_fails", "rank 1 failed: VerifyError: on this rank only", "on this rank only"),
        ("measured_on_one_rank_fails", "ZeroDivisionError", "rank 0 failed: TraceError"),
        ("other_calls", "this rank is at 'apply', rank 1 at 'compress: batches'", "rank 0 at 'apply'"),
    ):
        first, second = results(two, name)
        assert told in first
        assert own in second
        assert max(rank[name]["seconds"] for rank in two) < 10
    (told, kind), (own, other) = results(two, "factor_fails")
    assert "rank 1 failed: VerifyError: on this rank only" in told
    assert "on this rank only" in own
    assert kind == other == "Linear"


def times_are_those_of_rank_0(two):
    """One plan, one model, one report, although only one rank has run a clock."""
    first, second = results(two, "measured")
    assert first == second
    assert first["plan"][2]
    assert first["sweep"] < 1
    assert len(first["compress"][2]) == 2
    assert len(first["blocks"][3]) == 1
    assert "rank 1 has another model than rank 0" in first["another"]


def ddp_synchronises_or_refuses(two):
    for rank in results(two, "ddp"):
        for found in rank:
            assert "wrap the model anew" in found["stale"]
            assert found["right"]
            assert found["in step"]
            assert found["kept"]

    for shape, shared in results(two, "ddp_compressed"):
        assert shape != [32, 32]
        assert shared


def rounds_go_on_after_a_rank_was_killed(two, folder):
    """Rank 0 writes, all resume, and end where they would have without."""
    (whole, metrics, files), (other, others, _) = results(two, "iterate")
    assert whole == other
    assert metrics == others  # those of rank 0
    assert files == ["round-003.safetensors", "state.json"]
    assert "result" not in two[0].get("iterate_killed", {})
    assert "iterate_killed" not in two[1]
    assert (folder / "state.json").exists()
    again = run(2, ["iterate_resumed", "killed"])
    for found in results(again, "iterate_resumed"):
        assert found == [whole, metrics, files]
    said, seconds = result(again[0], "killed")
    assert "the process of rank 1 is gone" in said
    assert seconds < 10
    assert "killed" not in again[1]


def test_ranks_that_are_gone():
    said, seconds = result(run(2, ["first_killed"])[1], "first_killed")
    assert "the process that other ranks meet at is gone" in said or "the process of rank 0 is gone" in said
    assert seconds < 10
    said, seconds = result(run(2, ["raised_elsewhere"])[0], "raised_elsewhere")
    assert "the process of rank 1 is gone" in said
    assert seconds < 10


def test_a_rank_that_never_came():
    said, seconds = result(run(2, ["absent"])[0], "absent")
    assert "rank 1 did not come within 3 s" in said
    assert seconds < 30


@pytest.mark.slow  # two ranks do the same
def test_four_ranks():
    """One of them without data; and models that are spread over them."""
    jobs = ["plan_from_data", "compress", "data_that_raises", "fsdp_net", "tensor_parallel", "iterate", "killed"]
    four = run(4, jobs)
    as_one_process(results(four, "compress"))
    assert all(alike for each in results(four, "plan_from_data") for alike, _ in each.values())
    assert all("the disk of this rank is gone" in said for said in results(four, "data_that_raises"))
    for name in ("fsdp_net", "tensor_parallel"):
        for found in results(four, name):
            assert found["plan"]
            assert found["cut"] <= 1e-6
            assert found["trained"] <= 1e-4
            assert found["saved"] == 0
    assert len({(whole, str(metrics)) for whole, metrics, _ in results(four, "iterate")}) == 1
    for rank in four[:3]:
        said, seconds = result(rank, "killed")
        assert "rank 3 is gone" in said or "failed" in said  # of those that noticed first
        assert seconds < 20
