"""Random layouts and random things to learn about them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from secateur.axes import Atom, Concat, Layout, Mask, Product, factor, fix, free_atoms, pieces, resolve, unify

# A layout as plain data, so that it can be built anew for each order: a variable, or a kind and its parts.
Tree = int | tuple[str, tuple["Tree", ...]]


class Program(NamedTuple):
    """Variables, and what is learnt about them, in some order. Plain data: a list of three will do as well."""

    sizes: Sequence[int]
    equal: Sequence[tuple[Tree, Tree]]
    fixed: Sequence[int] = ()

    def steps(self) -> list[tuple[str, object]]:
        return [("equal", pair) for pair in self.equal] + [("fix", variable) for variable in self.fixed]


Learn = Callable[[Tree, Tree, Sequence[Atom]], None]


def build(tree: Tree, variables: Sequence[Atom]) -> Layout:
    if isinstance(tree, int):
        return variables[tree]
    kind, parts = tree
    built = tuple(build(part, variables) for part in parts)
    return Product(built) if kind == "product" else Concat(built)


def unify_trees(left: Tree, right: Tree, variables: Sequence[Atom]) -> None:
    unify(build(left, variables), build(right, variables))


def take_apart(left: Tree, right: Tree, variables: Sequence[Atom]) -> None:
    """The same through `factor` and `pieces`, as reshapes and splits do it."""
    _take_apart(build(left, variables), right, variables)


def _take_apart(layout: Layout, tree: Tree, variables: Sequence[Atom]) -> None:
    if isinstance(tree, int):
        unify(layout, variables[tree])
        return
    parts = [build(part, variables).size for part in tree[1]]
    taken = pieces(layout, parts) if tree[0] == "concat" else _factors(layout, parts)
    for mine, theirs in zip(taken, tree[1], strict=True):
        _take_apart(mine, theirs, variables)


def _factors(layout: Layout, sizes: Sequence[int]) -> Iterator[Layout]:
    for size in sizes:
        head, layout = factor(layout, size)
        yield head


def run(program: Program, order: Sequence[int] | None = None, through: Learn = unify_trees) -> list[Atom]:
    """Learn everything, in the given order of steps; what the variables are then."""
    variables = [Atom(n) for n in program.sizes]
    steps = program.steps()
    for i in order if order is not None else range(len(steps)):
        kind, what = steps[i]
        if kind == "fix":
            fix(variables[what], "fixed by the program")  # type: ignore[index]
        else:
            left, right = what  # type: ignore[misc]
            through(left, right, variables)
    return variables


def random_masks(layouts: Sequence[Layout], seed: int) -> dict[Atom, Mask]:
    """A mask for every axis that may be cut; at least one position stays."""
    rng = random.Random(seed)
    masks = {}
    for atom in dict.fromkeys(atom for layout in layouts for atom in free_atoms(layout)):
        mask = np.array([rng.random() < 0.6 for _ in range(atom.size)])
        mask[rng.randrange(atom.size)] = True
        masks[atom] = mask
    return masks


def kept_by_slicing(layout: Layout, masks: Mapping[Atom, Mask]) -> np.ndarray:
    """The positions that stay, found by slicing a grid of their numbers axis by axis."""
    layout = resolve(layout)
    if isinstance(layout, Atom):
        return np.arange(layout.size)[masks[layout]] if layout in masks else np.arange(layout.size)
    if isinstance(layout, Concat):
        starts = np.cumsum([0, *(part.size for part in layout.parts)])
        shifted = [kept_by_slicing(p, masks) + s for p, s in zip(layout.parts, starts, strict=False)]
        return np.concatenate([np.arange(0), *shifted])
    grid = np.arange(layout.size).reshape([part.size for part in layout.parts])
    for axis, part in enumerate(layout.parts):
        grid = np.take(grid, kept_by_slicing(part, masks), axis=axis)
    return grid.reshape(-1)


@st.composite
def programs(draw: st.DrawFn, kinds: tuple[str, ...] = ("product", "concat")) -> Program:
    """Up to five pairs of trees of the same size over shared variables, and up to two variables fixed."""
    sizes: list[int] = []

    def variable(size: int) -> int:
        known = [i for i, n in enumerate(sizes) if n == size]
        if known and draw(st.booleans()):
            return draw(st.sampled_from(known))
        sizes.append(size)
        return len(sizes) - 1

    def tree(size: int, depth: int) -> Tree:
        kind = draw(st.sampled_from(("leaf", *kinds))) if depth and size > 1 else "leaf"
        if kind == "product":
            divisors = [d for d in range(2, size) if size % d == 0]
            if divisors:
                head = draw(st.sampled_from(divisors))
                return "product", (tree(head, depth - 1), tree(size // head, depth - 1))
        if kind == "concat":
            at = draw(st.integers(1, size - 1))
            return "concat", (tree(at, depth - 1), tree(size - at, depth - 1))
        return variable(size)

    equal = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.sampled_from((2, 4, 6, 8, 12)))
        equal.append((tree(size, 2), tree(size, 2)))
    fixed = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=2))
    return Program(tuple(sizes), tuple(equal), tuple(fixed))
