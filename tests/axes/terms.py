"""Every small layout there is, written down index by index: what `unify` is compared with.

A layout *says* of each index which positions of which axes it is made of. A solution of an equation gives each
variable a layout, in such a way that both sides say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, pairwise, product

from programs import Program, Tree

from secateur.axes import Atom, Layout, positions

Shape = tuple[str, "int | tuple[Shape, ...]"]  # ("axis" | "fixed", size) or ("product" | "concat", parts)
Name = tuple[object, int]  # an axis and its size
Said = tuple[frozenset[tuple[Name, int]], ...]


# All layouts of a size -----------------------------------------------------------------------------------------------


@cache
def shapes(size: int) -> tuple[Shape, ...]:
    """Every layout in normal form of so many positions; which of its axes are the same one is left open."""
    found: list[Shape] = [("fixed", size)] + ([("axis", size)] if size > 1 else [])
    for kind, sizes in [("concat", each) for each in _sums(size)] + [("product", each) for each in _factors(size)]:
        every = product(*([s for s in shapes(n) if s[0] != kind] for n in sizes))
        found += [(kind, parts) for parts in every if not any(a[0] == b[0] == "fixed" for a, b in pairwise(parts))]
    return tuple(found)


def _sums(size: int) -> Iterator[tuple[int, ...]]:
    for first in range(1, size):
        yield first, size - first
        yield from ((first, *rest) for rest in _sums(size - first))


def _factors(size: int) -> Iterator[tuple[int, ...]]:
    for first in range(2, size):
        if size % first == 0:
            yield first, size // first
            yield from ((first, *rest) for rest in _factors(size // first))


def axes_of(shape: Shape) -> list[int]:
    kind, inside = shape
    if isinstance(inside, int):
        return [inside] if kind == "axis" else []
    return [size for part in inside for size in axes_of(part)]


def names(sizes: Sequence[int], known: tuple[int, ...] = ()) -> Iterator[list[int]]:
    """Every way in which things of these sizes are the same or not, as numbers."""
    if not sizes:
        yield []
        return
    for name, size in enumerate((*known, sizes[0])):
        if size == sizes[0]:
            now = known if name < len(known) else (*known, size)
            yield from ([name, *rest] for rest in names(sizes[1:], now))


@cache
def layouts(size: int) -> frozenset[object]:
    """What layouts of so many positions say, whatever their axes are called."""
    return frozenset(
        anonymous([say(shape, iter(chosen))]) for shape in shapes(size) for chosen in names(axes_of(shape))
    )


# What layouts say ----------------------------------------------------------------------------------------------------


def say(shape: Shape, called: Iterator[object]) -> Said:
    kind, inside = shape
    if isinstance(inside, int):
        return (frozenset(),) * inside if kind == "fixed" else _axis((next(called), inside))
    return _joined(kind, [say(part, called) for part in inside])


def say_tree(tree: Tree, variables: Mapping[int, Said]) -> Said:
    if isinstance(tree, int):
        return variables[tree]
    return _joined(tree[0], [say_tree(part, variables) for part in tree[1]])


def say_layout(layout: Layout) -> Said:
    found: list[set[tuple[Name, int]]] = [set() for _ in range(layout.size)]
    for atom, index in positions(layout):
        for place, position in enumerate(index.tolist()):
            if position >= 0 and atom.fixed is None:
                found[place].add(((atom, atom.size), position))
    return tuple(map(frozenset, found))


def _axis(name: Name) -> Said:
    return tuple(frozenset([(name, position)]) for position in range(name[1]))


def _joined(kind: str, parts: Sequence[Said]) -> Said:
    if kind == "concat":
        return tuple(chain.from_iterable(parts))
    return tuple(frozenset().union(*row) for row in product(*parts))


def anonymous(said: Sequence[Said]) -> object:
    """The same whatever axes are called: each as the places of each of its positions."""
    places: dict[Name, list[list[tuple[int, int]]]] = {}
    for number, one in enumerate(said):
        for index, here in enumerate(one):
            for name, position in here:
                places.setdefault(name, [[] for _ in range(name[1])])[position].append((number, index))
    return tuple(sorted(tuple(map(tuple, axis)) for axis in places.values()))


# Solutions -----------------------------------------------------------------------------------------------------------


def equations(size: int) -> Iterator[Program]:
    """Every pair of layouts of a size, with every choice of what is the same axis on both sides or on one."""
    for left, right in product(shapes(size), repeat=2):
        sizes = axes_of(left) + axes_of(right)
        for chosen in names(sizes):
            known = dict(sorted(zip(chosen, sizes, strict=True)))
            variables, called = list(known.values()), iter(chosen)
            both = tuple(_tree(shape, called, variables) for shape in (left, right))
            yield Program(tuple(variables), (both,), tuple(range(len(known), len(variables))))  # type: ignore[arg-type]


def _tree(shape: Shape, called: Iterator[int], variables: list[int]) -> Tree:
    kind, inside = shape
    if not isinstance(inside, int):
        return kind, tuple(_tree(part, called, variables) for part in inside)
    if kind == "axis":
        return next(called)
    variables.append(inside)
    return len(variables) - 1


def solutions(program: Program) -> Iterator[dict[int, Said]]:
    """Every way of giving a layout to each variable of one equation that makes both sides say the same."""
    ((left, right),) = program.equal
    if _choices(left, program) > _choices(right, program):
        left, right = right, left
    mine = sorted(set(variables_of(left)))
    for chosen in product(*(_allowed(v, program) for v in mine)):
        for called in names([size for shape in chosen for size in axes_of(shape)]):
            name = iter(called)
            given = {v: say(shape, name) for v, shape in zip(mine, chosen, strict=True)}
            found = project(right, say_tree(left, given), program.sizes)
            if found is not None and all(_agrees(said, given.get(v), v in program.fixed) for v, said in found.items()):
                yield given | found


def _allowed(variable: int, program: Program) -> Sequence[Shape]:
    size = program.sizes[variable]
    return [("fixed", size)] if variable in program.fixed else shapes(size)


def _choices(tree: Tree, program: Program) -> int:
    count = 1
    for variable in set(variables_of(tree)):
        count *= len(_allowed(variable, program))
    return count


def _agrees(said: Said, given: Said | None, fixed: bool) -> bool:
    if fixed and any(said):
        return False
    return said == given if given is not None else anonymous([said]) in layouts(len(said))


def variables_of(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [v for part in tree[1] for v in variables_of(part)]


def project(tree: Tree, said: Said, sizes: Sequence[int]) -> dict[int, Said] | None:
    """What the variables of a tree must say for the tree to say this, if there is anything.

    A position of a variable says what all indices that it is part of have in common: no layout has anything in
    common with itself at all of its indices.
    """
    own = {v: _axis((v, sizes[v])) for v in variables_of(tree)}
    found = _common(say_tree(tree, own), said)
    variables = {v: tuple(found[(v, sizes[v]), p] for p in range(sizes[v])) for v in own}
    return variables if say_tree(tree, variables) == said else None


def special_case(solution: Mapping[int, Said], general: Mapping[int, Said]) -> bool:
    """Whether giving a layout to each axis of the general solution makes it this one."""
    found: dict[tuple[Name, int], frozenset[tuple[Name, int]]] = {}
    for variable, said in solution.items():
        for place, here in _common(general[variable], said).items():
            found[place] = found.get(place, here) & here
    for variable, said in solution.items():
        if any(frozenset().union(*map(found.get, a)) != b for a, b in zip(general[variable], said, strict=True)):
            return False
    axes = {name for name, _ in found}
    return all(anonymous([tuple(found[name, p] for p in range(name[1]))]) in layouts(name[1]) for name in axes)


def _common(said: Said, other: Said) -> dict[tuple[Name, int], frozenset[tuple[Name, int]]]:
    found: dict[tuple[Name, int], frozenset[tuple[Name, int]]] = {}
    for here, there in zip(said, other, strict=True):
        for place in here:
            found[place] = found.get(place, there) & there
    return found


def what_is_known(variables: Sequence[Atom]) -> dict[int, Said]:
    return {v: say_layout(variable) for v, variable in enumerate(variables)}
