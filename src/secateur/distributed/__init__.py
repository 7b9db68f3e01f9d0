"""Several processes with one model: what is decided is the same everywhere, and what fails on one rank fails on all."""

from secateur.distributed.batches import everyones
from secateur.distributed.meeting import agreed, alone, everywhere, in_step, meet, of_first, present, ranks, together
from secateur.distributed.sharded import (
    Undressed,
    at_rest,
    bare,
    emptied,
    is_managed,
    is_sharded,
    moved,
    plain_kind,
    reshard,
    spread_like,
    whole,
)
from secateur.distributed.sums import pooled, totals

__all__ = ["agreed", "alone", "everyones", "everywhere", "in_step", "meet", "of_first", "pooled", "present", "ranks"]
__all__ += ["together", "totals"]
__all__ += ["Undressed", "at_rest", "bare", "emptied", "is_managed", "is_sharded", "moved", "plain_kind", "spread_like"]
__all__ += ["reshard", "whole"]
