"""How many positions each axis keeps, so that every size the model's code computes still comes out right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from secateur.axes import Atom
from secateur.trace.equations import Constraint, Sizes

_TRIES = 20_000


def settle(sizes: Sizes, wanted: Mapping[Atom, int]) -> dict[Atom, int]:
    """The counts nearest to the wanted ones that satisfy every constraint; an axis that cannot follow stays whole."""
    counts = dict(wanted)
    for atoms, constraints in components(sizes):
        counts.update(settle_group(sizes, atoms, constraints, wanted))
    return counts


def settle_group(
    sizes: Sizes, atoms: Sequence[Atom], constraints: Sequence[Constraint], wanted: Mapping[Atom, int]
) -> dict[Atom, int]:
    """The same for axes whose counts depend on each other and on no others."""
    wanted = {**wanted, **{atom: _allowed(sizes, atom, constraints, wanted[atom]) for atom in atoms if atom in wanted}}
    if all(sizes.holds(c, wanted) for c in constraints):
        return {atom: wanted[atom] for atom in atoms if atom in wanted}
    return _search(sizes, atoms, constraints, wanted)


def _allowed(sizes: Sizes, atom: Atom, constraints: Sequence[Constraint], wanted: int) -> int:
    """The wanted count, or the next above it that an axis may have whatever the others have."""
    own = [c for c in constraints if sizes.atoms_of(c.left, c.right) == [atom]]
    if not own:
        return wanted
    counts = range(wanted, atom.size)
    return next((n for n in counts if all(sizes.holds(c, {atom: n}) for c in own)), atom.size)


def components(sizes: Sizes) -> list[tuple[list[Atom], list[Constraint]]]:
    """Axes whose counts depend on each other, with the constraints among them."""
    leader: dict[Atom, Atom] = {}

    def find(atom: Atom) -> Atom:
        while leader.setdefault(atom, atom) is not atom:
            leader[atom] = leader[leader[atom]]
            atom = leader[atom]
        return atom

    involved = [(c, sizes.atoms_of(c.left, c.right)) for c in sizes.constraints]
    for _, atoms in involved:
        for atom in atoms[1:]:
            leader[find(atom)] = find(atoms[0])
    groups: dict[Atom, tuple[list[Atom], list[Constraint]]] = {}
    for constraint, atoms in involved:
        if atoms:
            group = groups.setdefault(find(atoms[0]), ([], []))
            group[0].extend(a for a in atoms if a not in group[0])
            group[1].append(constraint)
    return list(groups.values())


def _search(
    sizes: Sizes, atoms: Sequence[Atom], constraints: Sequence[Constraint], wanted: Mapping[Atom, int]
) -> dict[Atom, int]:
    """Depth first, the wanted count before the whole one; each constraint is tested once its axes are chosen."""
    order = _most_shared_first(sizes, atoms, constraints)
    ready: list[list[Constraint]] = [[] for _ in order]
    for constraint in constraints:
        ready[max(order.index(a) for a in sizes.atoms_of(constraint.left, constraint.right))].append(constraint)
    chosen: dict[Atom, int] = {}
    budget = [_TRIES]

    def go(depth: int) -> bool:
        if depth == len(order):
            return True
        atom = order[depth]
        for count in dict.fromkeys((wanted.get(atom, atom.size), atom.size)):
            budget[0] -= 1
            chosen[atom] = count
            if all(sizes.holds(c, chosen) for c in ready[depth]) and go(depth + 1):
                return True
            if budget[0] <= 0:
                break
        del chosen[atom]
        return False

    return chosen if go(0) else {atom: atom.size for atom in atoms}


def _most_shared_first(sizes: Sizes, atoms: Sequence[Atom], constraints: Iterable[Constraint]) -> list[Atom]:
    """The axes of most constraints first, then neighbours together, so that a dead end shows early."""
    involved = [sizes.atoms_of(c.left, c.right) for c in constraints]
    degree = {atom: sum(atom in group for group in involved) for atom in atoms}
    order: list[Atom] = []
    for group in sorted(involved, key=lambda g: -max(degree[a] for a in g)):
        order += [a for a in sorted(group, key=lambda a: -degree[a]) if a not in order]
    return order
