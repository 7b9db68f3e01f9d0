"""Several runs, one graph: what any run shows, holds.

Each run is recorded by itself, so that one that fails leaves nothing behind. Dimensions of one and the same tensor are
one and the same axis, whatever run they come from: unifying them joins what the runs have learnt. Equations between
sizes, comparisons and reasons add up. What ops cost and how long they take stays that of the first run.
"""

from secateur.axes import unify
from secateur.tracing.capture import Capture


def join(capture: Capture, other: Capture) -> None:
    """Add to what some runs have shown what another one has."""
    for name, value in other.values.items():
        mine = capture.values.setdefault(name, value)
        capture.joined.append((name, value.dims))
        for dim, theirs in zip(mine.dims, value.dims, strict=True):
            unify(dim, theirs)
        mine.used = mine.used or value.used
    capture.kinds = {**other.kinds, **capture.kinds}
    capture.places = {**other.places, **capture.places}
    capture.rewritten |= other.rewritten
    for name, flow in other.flows.items():
        capture.flows.setdefault(name, []).extend(flow)
    ours, theirs_too = capture.tracer, other.tracer
    ours.sizes.equations += theirs_too.sizes.equations
    ours.sizes.comparisons += theirs_too.sizes.comparisons
    ours.sizes.value_uses += theirs_too.sizes.value_uses
    ours.sizes.made |= theirs_too.sizes.made
    ours.uses += theirs_too.uses
    ours.unknown = {**theirs_too.unknown, **ours.unknown}
    ours.decisions = {**ours.decisions, **theirs_too.decisions}
