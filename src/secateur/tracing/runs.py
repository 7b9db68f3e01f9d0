"""Several runs, one graph: what any run shows, holds.

Each run is recorded by itself, so that one that fails leaves nothing behind. Dimensions of one and the same tensor are
one and the same axis, whatever run they come from: unifying them joins what the runs have learnt. Equations between
sizes, comparisons and reasons add up. What ops cost and how long they take stays that of the first run.
"""

from secateur.axes import Atom, Contradiction, Layout, atoms, copied, unify
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
    capture.reached |= other.reached
    capture.taken |= other.taken
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


def at_odds(capture: Capture, other: Capture) -> bool:
    """Whether a run takes the positions of some tensor for something that excludes what others take them for.

    Weights in another order, say, as a flag of a module's constructor has them: with it turned, these weights mean
    nothing, so that what the code then does is no reason against a cut.
    """
    made: dict[Atom, Atom] = {}
    pairs: list[tuple[Layout, Layout]] = []
    for name, value in other.values.items():
        if name in capture.values:
            both = zip(capture.values[name].dims, value.dims, strict=True)
            pairs += ((copied(ours, made), copied(theirs, made)) for ours, theirs in both)
    if any(isinstance(atom.fixed, Contradiction) for atom in made.values()):
        return False  # in each of them alone
    for ours, theirs in pairs:
        unify(ours, theirs)
    return any(isinstance(atom.fixed, Contradiction) for ours, _ in pairs for atom in atoms(ours))
