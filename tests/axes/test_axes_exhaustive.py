"""`unify` on all small equations: what it finds is sound, and the most general there is.

Of what is too much for every run, every so-and-so-many-th is looked at; twenty times as many with `SECATEUR_FUZZ`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, islice, permutations, product
from typing import TypeVar

import numpy as np
import pytest
from programs import Program, Tree, build, run, take_apart, unify_trees
from terms import (
    Shape,
    anonymous,
    equations,
    names,
    say_layout,
    say_tree,
    shapes,
    solutions,
    special_case,
    what_is_known,
)

from kept import COUNT
from secateur.axes import Atom, Mask, free_atoms, keep_mask

T = TypeVar("T")


def some(all_of_them: Iterable[T], every: int) -> Iterator[T]:
    return islice(all_of_them, 0, None, max(1, every // 20) if COUNT else every)


def known(variables: list[Atom]) -> object:
    return anonymous([say_layout(variable) for variable in variables])


def check(program: Program) -> None:
    """Both sides say the same; once more, the other way round or piece by piece changes nothing; all is found."""
    variables = run(program)
    found = what_is_known(variables)
    ((left, right),) = program.equal
    assert say_tree(left, found) == say_tree(right, found)
    steps = range(len(program.steps()))
    for again in ([*steps, *steps], [*reversed(steps)]):
        assert known(run(program, again)) == known(variables)
    assert known(run(program, through=take_apart)) == known(variables)
    assert known(run(program._replace(equal=[(right, left)]))) == known(variables)
    unify_trees(left, right, variables)
    assert known(variables) == anonymous(list(found.values()))
    for solution in solutions(program):
        assert special_case(solution, found), solution


@pytest.mark.parametrize(("size", "every"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 4), (6, 80)])
def test_every_solution_of_an_equation_is_a_special_case_of_what_is_found(size: int, every: int) -> None:
    for program in some(equations(size), every):
        check(program)


def products(size: int, largest: int) -> Iterator[Program]:
    """Every pair of products of two or three axes of a size, with every choice of what is the same axis."""
    sides = [
        sizes for count in (2, 3) for sizes in product(range(2, largest + 1), repeat=count) if np.prod(sizes) == size
    ]
    for left, right in product(sides, repeat=2):
        for chosen in names([*left, *right]):
            sizes = dict(zip(chosen, [*left, *right], strict=True))
            trees = ("product", tuple(chosen[: len(left)])), ("product", tuple(chosen[len(left) :]))
            yield Program([sizes[v] for v in sorted(sizes)], [trees])


@pytest.mark.parametrize(("size", "every"), [(12, 5), (16, 17), (18, 31), (24, 61), (36, 397)])
def test_every_solution_of_an_equation_of_products_is_a_special_case(size: int, every: int) -> None:
    for program in some(products(size, 6), every):
        check(program)


def rows(size: int, longest: int) -> Iterator[Program]:
    """Every product of two axes beside every concatenation of two or three, and of what is the same axis."""
    factors = [(n, size // n) for n in range(2, size) if size % n == 0]
    sums = [sizes for n in (2, 3) for sizes in product(range(1, longest + 1), repeat=n) if sum(sizes) == size]
    for left, right in product(factors, sums):
        for chosen in names([*left, *right]):
            sizes = dict(zip(chosen, [*left, *right], strict=True))
            trees = ("product", tuple(chosen[:2])), ("concat", tuple(chosen[2:]))
            yield Program([sizes[v] for v in sorted(sizes)], [trees])


@pytest.mark.parametrize(("size", "every"), [(6, 1), (8, 3), (9, 3), (10, 5), (12, 7)])
def test_every_solution_of_a_product_cut_anywhere_is_a_special_case(size: int, every: int) -> None:
    for program in some(rows(size, 7), every):
        check(program)


def every_mask(variables: list[Atom]) -> Iterator[dict[Atom, Mask]]:
    free = list(dict.fromkeys(atom for variable in variables for atom in free_atoms(variable)))
    choices = [[np.array(mask) for mask in product((True, False), repeat=atom.size) if any(mask)] for atom in free]
    return (dict(zip(free, masks, strict=True)) for masks in product(*choices))


@pytest.mark.parametrize(("size", "every"), [(4, 1), (6, 400)])
def test_both_sides_keep_the_same_whatever_is_kept_of_the_axes(size: int, every: int) -> None:
    for program in some(equations(size), every):
        variables = run(program)
        ((left, right),) = program.equal
        for masks in every_mask(variables):
            a, b = (keep_mask(build(tree, variables), masks) for tree in (left, right))
            assert a.tolist() == b.tolist()


# Several equations over the same variables: a single position, axes of 2, 2, 3, 4 and 6.
SIZES = (1, 2, 2, 3, 4, 6)


def over(shape: Shape) -> Iterator[Tree]:
    """Every tree of a shape over these variables."""
    kind, inside = shape
    if isinstance(inside, int):
        yield from (v for v, size in enumerate(SIZES) if size == inside and (kind == "axis" or size == 1))
    else:
        yield from ((kind, parts) for parts in product(*map(over, inside)))  # type: ignore[misc]


FACTS = [pair for size in (4, 6) for pair in combinations([t for s in shapes(size) for t in over(s)], 2)]


@pytest.mark.parametrize(("count", "every"), [(2, 9001), (3, 71)])
def test_any_order_of_several_equations_finds_the_same(count: int, every: int) -> None:
    step = 1 if count == 2 else 90
    for facts in some(combinations(FACTS[::step], count), every):
        orders = permutations(range(count))
        first, *others = (known(run(Program(SIZES, facts), order)) for order in orders)
        assert all(other == first for other in others)
        assert known(run(Program(SIZES, facts), [*range(count)] * 2, take_apart)) == first
