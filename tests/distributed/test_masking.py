"""Masks on models that are sharded: the same as on one process, through training and until they are final."""

from fsdp import needs_right_training
from processes import result, run

TRAINED = ("masks_fsdp", "masks_first", "masks_parallel", "masks_sparsifier")


@needs_right_training
def test_two_ranks():
    for rank in run(2, ["masks_same", *TRAINED, "masks_refused"]):
        assert result(rank, "masks_same") == dict.fromkeys(
            ("up.weight_mask", "mid.weight_mask", "down.weight_mask"), True
        )
        for name in TRAINED:
            found = result(rank, name)
            assert max(found["off"]) <= 1e-5, name
            assert found["held"] <= 1e-5, name  # gradients are added up in another order
        refused = result(rank, "masks_refused")
        assert "seed all of them alike" in refused["said"]["drawn"]
        assert "spread over ranks, and whole rows of it cannot be removed" in refused["said"]["rows"]
        assert refused["same"]
