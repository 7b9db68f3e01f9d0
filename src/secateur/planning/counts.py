"""How many positions each axis keeps, so that every size the model's code computes still comes out right.

A target wants a count for each axis by itself. But `x.view(n, self.heads, x.shape[-1] // self.heads)` ties counts: the
width must be heads × dims after the cut as well. Such constraints (see `tracing.equations`) split the axes into small
components. In each the wanted counts are taken if they satisfy everything; else axes keep more, as little more as can
be found. To keep all is always a solution.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from secateur.axes import Atom
from secateur.sizes.size import Dim, Expr
from secateur.tracing.equations import Constraint, Equations

Bound = tuple[Constraint, list[int]]  # a constraint and the classes, by number, that it speaks of

_TRIES, _BETTER, _ROUNDS = 20_000, 2_000, 100  # for a solution, for one that is nearer, and how often more is asked


def settle(
    equations: Equations, wanted: Mapping[Atom, int], instead: Mapping[Atom, int] | None = None
) -> dict[Atom, int]:
    """The counts from the wanted ones upwards that satisfy every constraint; an axis that cannot follow stays whole.

    `instead` are counts that some axes may have where they cannot have those wanted.
    """
    counts = dict(wanted)
    for atoms, constraints in components(equations):
        counts.update(settle_group(equations, atoms, constraints, wanted, instead))
    return counts


def settle_group(
    equations: Equations,
    atoms: Sequence[Atom],
    constraints: Sequence[Constraint],
    wanted: Mapping[Atom, int],
    instead: Mapping[Atom, int] | None = None,
) -> dict[Atom, int]:
    """The same for axes whose counts depend on each other and on no others."""
    wanted = {
        **wanted,
        **{atom: _allowed(equations, atom, constraints, wanted[atom]) for atom in atoms if atom in wanted},
    }
    if all(equations.holds(c, wanted) for c in constraints):
        return {atom: wanted[atom] for atom in atoms if atom in wanted}
    return _search(equations, atoms, constraints, wanted, instead or {})


def _allowed(equations: Equations, atom: Atom, constraints: Sequence[Constraint], wanted: int) -> int:
    """The wanted count, or the next above it that an axis may have whatever the others have."""
    own = [c for c in constraints if equations.atoms_of(c.left, c.right) == [atom]]
    if not own:
        return wanted
    counts = range(wanted, atom.size)
    return next((n for n in counts if all(equations.holds(c, {atom: n}) for c in own)), atom.size)


def components(equations: Equations) -> list[tuple[list[Atom], list[Constraint]]]:
    """Axes whose counts depend on each other, with the constraints among them."""
    leader: dict[Atom, Atom] = {}

    def find(atom: Atom) -> Atom:
        while leader.setdefault(atom, atom) is not atom:
            leader[atom] = leader[leader[atom]]
            atom = leader[atom]
        return atom

    involved = [(c, equations.atoms_of(c.left, c.right)) for c in equations.constraints]
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
    equations: Equations,
    atoms: Sequence[Atom],
    constraints: Sequence[Constraint],
    wanted: Mapping[Atom, int],
    instead: Mapping[Atom, int],
) -> dict[Atom, int]:
    """The counts from the wanted ones upwards, or those to have instead, that are nearest and satisfy everything.

    Axes that must keep equally many (the layers of a model that is built from one number) are one unknown. There are
    many constraints, most of which say the same for each layer: only those that a solution breaks are looked at.
    """
    involved = {constraint: equations.atoms_of(constraint.left, constraint.right) for constraint in constraints}
    classes = _classes(equations, atoms, involved, wanted)
    tries = [_tries(group, wanted, instead) for group in classes]
    of = {atom: i for i, group in enumerate(classes) for atom in group}
    found = [options[0][1] for options in tries]
    active: list[Bound] = []
    for _ in range(_ROUNDS):
        counts = {atom: found[i] for atom, i in of.items()}
        broken = {c.shape: c for c in constraints if not equations.holds(c, counts)}
        if not broken:
            return counts
        active += ((c, sorted({of[atom] for atom in involved[c]})) for c in broken.values())
        for part in _parts(active):
            nearest = _nearest(equations, classes, tries, part)
            if nearest is None:
                return {atom: atom.size for atom in atoms}
            for at, count in nearest.items():
                found[at] = count
    return {atom: atom.size for atom in atoms}


def _parts(constraints: Sequence[Bound]) -> list[list[Bound]]:
    """Constraints by which of them have classes in common, directly or through others."""
    found: list[tuple[set[int], list[Bound]]] = []
    for bound in constraints:
        near = [part for part in found if not part[0].isdisjoint(bound[1])]
        found = [part for part in found if part[0].isdisjoint(bound[1])]
        found.append(({*bound[1]}.union(*(p[0] for p in near)), [*(b for p in near for b in p[1]), bound]))
    return [part for _, part in found]


def _tries(group: Sequence[Atom], wanted: Mapping[Atom, int], instead: Mapping[Atom, int]) -> list[tuple[float, int]]:
    """The counts that axes may have which keep equally many, nearest first, each with how far off it is."""
    size, least = group[0].size, max(wanted.get(atom, atom.size) for atom in group)
    counts = {*range(least, size + 1), max(instead.get(atom, size) for atom in group)}
    return sorted((abs(count - least) / size, count) for count in counts)


def _classes(
    equations: Equations,
    atoms: Sequence[Atom],
    involved: Mapping[Constraint, Sequence[Atom]],
    wanted: Mapping[Atom, int],
) -> list[list[Atom]]:
    """Axes by which of them keep equally many: those that must, and those of which the same is said and wanted.

    The ones that most is said of come first: the others follow from them.
    """
    said: dict[Atom, list[tuple[str, int]]] = {atom: [] for atom in atoms}
    for constraint, pair in involved.items():
        for role, atom in enumerate(pair):
            said[atom].append((constraint.shape, role))
    alike: dict[object, list[Atom]] = {}
    for atom in atoms:
        alike.setdefault((atom.size, wanted.get(atom), tuple(sorted(set(said[atom])))), []).append(atom)
    group_of = {atom: group for group in alike.values() for atom in group}
    for constraint, pair in involved.items():
        if len(pair) == 2 and group_of[pair[0]] is not group_of[pair[1]] and _says_equal(equations, constraint, *pair):
            one, other = group_of[pair[0]], group_of[pair[1]]
            one.extend(other)
            group_of.update(dict.fromkeys(other, one))
    groups = {id(group): group for group in group_of.values()}
    weight = {key: len({shape for atom in group for shape, _ in said[atom]}) for key, group in groups.items()}
    return [groups[key] for key in sorted(groups, key=lambda key: (-weight[key], groups[key][0].size))]


def _says_equal(equations: Equations, constraint: Constraint, a: Atom, b: Atom) -> bool:
    if a.size != b.size:
        return False
    some = {1, a.size // 2, a.size - 1, a.size} - {0}
    return all(equations.holds(constraint, {a: m, b: n}) == (m == n) for m in some for n in some)


def _nearest(
    equations: Equations,
    classes: Sequence[Sequence[Atom]],
    tries: Sequence[Sequence[tuple[float, int]]],
    constraints: Sequence[Bound],
) -> dict[int, int] | None:
    """A count for each class, all together as near to what is wanted as can be: depth first, bounded."""
    best: dict[int, int] | None = None
    least, left = float("inf"), _TRIES
    chosen: dict[int, int] = {}
    counts: dict[Atom, int] = {}
    order = _order(constraints, tries)
    ready: dict[int, list[Constraint]] = {at: [] for at in order}
    for constraint, unknowns in constraints:
        ready[max(unknowns, key=order.index)].append(constraint)
    told = {at: _determined(equations, classes[at], ready[at]) for at in order}

    def go(i: int, off: float) -> None:
        nonlocal best, least, left
        if i == len(order):
            best, least, left = dict(chosen), off, min(left, _BETTER)
            return
        at = order[i]
        for more, count in _told(told[at], counts, tries[at]):
            left -= 1
            if off + more >= least or left <= 0:
                return
            counts.update(dict.fromkeys(classes[at], count))
            if all(equations.holds(c, counts) for c in ready[at]):
                chosen[at] = count
                go(i + 1, off + more)

    go(0, 0.0)
    return best


def _order(constraints: Sequence[Bound], tries: Sequence[Sequence[object]]) -> list[int]:
    """The classes that constraints speak of: next comes one that least is open about, so that failures show early."""
    left = {at for _, unknowns in constraints for at in unknowns}
    order: list[int] = []
    while left:
        open_ = [rest for _, unknowns in constraints if (rest := [at for at in unknowns if at in left])]
        fewest = min(open_, key=lambda rest: (len(rest), min(len(tries[at]) for at in rest)))
        at = min(fewest, key=lambda at: len(tries[at]))
        order.append(at)
        left.discard(at)
    return order


def _told(
    determined: Callable[[Mapping[Atom, int]], int | None] | None,
    counts: Mapping[Atom, int],
    tries: Sequence[tuple[float, int]],
) -> Sequence[tuple[float, int]]:
    """The counts that a class may have: the one that others tell, if they do."""
    only = None if determined is None else determined(counts)
    return tries if only is None else [pair for pair in tries if pair[1] == only]


def _determined(
    equations: Equations, group: Sequence[Atom], constraints: Sequence[Constraint]
) -> Callable[[Mapping[Atom, int]], int | None] | None:
    """What tells the count of a class from those of others: an equation with a size that grows evenly with it."""
    for constraint in constraints:
        if constraint.symbol == "==" and constraint.outcome:
            for side, other in ((constraint.left, constraint.right), (constraint.right, constraint.left)):
                if isinstance(side, Dim) and not set(group) & set(equations.atoms_of(other)):
                    return partial(_solved, equations, group, side, other)
    return None


def _solved(
    equations: Equations, group: Sequence[Atom], side: Expr, other: Expr, counts: Mapping[Atom, int]
) -> int | None:
    try:
        wanted = equations.value(other, counts)
    except ZeroDivisionError:
        return None
    one, two, three = (equations.value(side, {**counts, **dict.fromkeys(group, n)}) for n in (1, 2, 3))
    if two == one or three - two != two - one:
        return None
    return int((wanted - one) // (two - one)) + 1
