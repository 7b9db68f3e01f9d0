"""What any sequence of learning leaves true."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import strategies as st
from programs import Program, build, kept_by_slicing, programs, random_masks, run, take_apart, unify_trees
from terms import anonymous, say_layout

from kept import drawn
from secateur.axes import (
    Atom,
    Concat,
    Layout,
    Product,
    atoms,
    constant,
    factor,
    fix,
    free_atoms,
    hint,
    keep_mask,
    note,
    pieces,
    positions,
    resolve,
    size_after,
    split,
    unify,
    why_fixed,
)

SEEDS = st.integers(0, 2**16)


def of_programs(
    test: Callable[[Program, int], None], kinds: tuple[str, ...] = ("product", "concat")
) -> Callable[..., None]:
    """A test of random programs; cases that are kept are lists."""

    @wraps(test)
    def plain(program: Sequence[object], seed: int) -> None:
        test(Program(*program), seed)  # type: ignore[arg-type]

    return drawn(60, program=programs(kinds), seed=SEEDS)(plain)


def known(variables: Sequence[Atom]) -> object:
    """All that is known, whatever the axes are called."""
    return anonymous([say_layout(variable) for variable in variables])


@of_programs
def test_whatever_is_learnt_sizes_stay_and_equal_layouts_keep_the_same(program: Program, seed: int) -> None:
    variables = run(program)
    masks = random_masks(variables, seed)
    for size, variable in zip(program.sizes, variables, strict=True):
        assert resolve(variable).size == size
        assert len(keep_mask(variable, masks)) == size
    for left, right in program.equal:
        a, b = (keep_mask(build(tree, variables), masks) for tree in (left, right))
        assert a.tolist() == b.tolist()


@of_programs
def test_what_is_fixed_stays_whole(program: Program, seed: int) -> None:
    variables = run(program)
    masks = random_masks(variables, seed)
    for variable in program.fixed:
        assert keep_mask(variables[variable], masks).all()
        assert free_atoms(variables[variable]) == []


@of_programs
def test_neither_the_order_nor_the_way_of_learning_matters(program: Program, seed: int) -> None:
    order = list(range(len(program.steps()))) * 2
    random.Random(seed).shuffle(order)
    first = known(run(program))
    assert known(run(program, order)) == first
    assert known(run(program, order, take_apart)) == first


@of_programs
def test_the_sides_of_an_equation_may_be_swapped(program: Program, seed: int) -> None:
    swapped = program._replace(equal=[(right, left) for left, right in program.equal])
    assert known(run(swapped)) == known(run(program))


def splits_and_concatenations(test: Callable[[Program, int], None]) -> Callable[..., None]:
    return of_programs(test, kinds=("concat",))


@splits_and_concatenations
def test_splits_and_concatenations_tie_exactly_what_they_must(program: Program, seed: int) -> None:
    """Without products, what goes together is found position by position, by a union of sets."""
    leader = {(v, i): (v, i) for v, n in enumerate(program.sizes) for i in range(n)}

    def find(place: tuple[int, int]) -> tuple[int, int]:
        while leader[place] != place:
            place = leader[place]
        return place

    def places(tree: object) -> list[tuple[int, int]]:
        if isinstance(tree, int):
            return [(tree, i) for i in range(program.sizes[tree])]
        return [place for part in tree[1] for place in places(part)]  # type: ignore[index]

    for left, right in program.equal:
        for a, b in zip(places(left), places(right), strict=True):
            leader[find(a)] = find(b)
    together: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for place in leader:
        together.setdefault(find(place), set()).add(place)
    for axis in known(run(program)):  # type: ignore[attr-defined]
        for position in axis:
            assert set(position) == together[find(position[0])]


@of_programs
def test_a_mask_selects_what_slicing_the_grid_of_positions_selects(program: Program, seed: int) -> None:
    variables = run(program)
    masks = random_masks(variables, seed)
    for variable in variables:
        assert np.flatnonzero(keep_mask(variable, masks)).tolist() == kept_by_slicing(variable, masks).tolist()


@of_programs
def test_positions_and_size_after_agree_with_the_mask(program: Program, seed: int) -> None:
    variables = run(program)
    masks = random_masks(variables, seed)
    counts = {atom: int(mask.sum()) for atom, mask in masks.items()}
    for variable in variables:
        mask = keep_mask(variable, masks)
        assert size_after(variable, counts) == mask.sum()
        stays = np.ones(variable.size, np.bool_)
        for atom, index in positions(variable):
            if atom in masks:
                stays &= np.where(index < 0, True, masks[atom][index])
        assert stays.tolist() == mask.tolist()


@of_programs
def test_learning_the_same_again_changes_nothing(program: Program, seed: int) -> None:
    variables = run(program, through=take_apart)
    before = known(variables)
    shown = [repr(resolve(variable)) for variable in variables]
    for left, right in program.equal:
        unify_trees(left, right, variables)
    assert known(variables) == before
    assert [repr(resolve(variable)) for variable in variables] == shown


@of_programs
def test_notes_reach_every_part(program: Program, seed: int) -> None:
    """Whether said before or after, inexactness holds for all that a layout turns out to be made of."""
    early, late = ([Atom(n) for n in program.sizes] for _ in range(2))
    note(early[0], "why")
    for variables in (early, late):
        for left, right in program.equal:
            unify_trees(left, right, variables)
    note(late[0], "why")
    for variables in (early, late):
        for atom in free_atoms(variables[0]):
            assert list(atom.notes) == ["why"]


@of_programs
def test_the_normal_form_is_flat(program: Program, seed: int) -> None:
    """No part of a part's own kind, no two constants side by side, nothing with a single part, nothing bound."""
    todo: list[Layout] = [resolve(variable) for variable in run(program)]
    while todo:
        layout = todo.pop()
        if isinstance(layout, Atom):
            assert layout.bound is None
            continue
        assert len(layout.parts) != 1
        assert not any(type(part) is type(layout) for part in layout.parts)
        assert not any(constant(a) and constant(b) for a, b in pairwise(layout.parts))
        assert all(part.size < layout.size for part in layout.parts)
        todo += layout.parts


def test_a_concatenation_that_grows_stays_flat() -> None:
    a, b, c = Atom(2), Atom(3), Atom(4)
    grown = resolve(Concat((resolve(Concat((a, b))), c)))
    assert isinstance(grown, Concat)
    assert grown.parts == (a, b, c)
    product = resolve(Product((resolve(Product((a, b))), c)))
    assert isinstance(product, Product)
    assert product.parts == (a, b, c)


def test_a_row_of_a_product_may_be_several_parts() -> None:
    """One head of two halves beside three heads of two halves: still four heads."""
    half, other = Atom(2), Atom(2)
    dims = Concat((half, other))
    rows = Concat((Product((Atom(3), dims)), dims))
    unify(rows, Product((Atom(4), dims)))
    assert free_atoms(rows)[1:] == [half, other]


# By eye ----------------------------------------------------------------------------------------------------


def test_heads_of_a_fused_projection() -> None:
    """qkv = (3 × heads × dims) and its bias, and one split into q, k and v: all is one thing."""
    rows, bias = Atom(12), Atom(12)
    three, rest = factor(rows, 3)
    heads, dims = factor(rest, 2)
    unify(rows, bias)
    fix(three, "q, k, v")
    assert repr(resolve(bias)) == "(!3×2×2)"
    kept = keep_mask(bias, {heads: np.array([True, False])})  # type: ignore[dict-item]
    assert kept.astype(int).tolist() == [1, 1, 0, 0] * 3
    assert size_after(bias, {dims: 1}) == 6  # type: ignore[dict-item]


def test_a_product_of_a_concat_is_a_concat_of_products() -> None:
    channels = Concat((Atom(2), Atom(3)))
    flat = Product((channels, Atom(4)))
    unify(flat, Concat((Atom(8), Atom(12))))
    assert repr(resolve(flat)) == "((2+3)×4)"


def test_two_ways_to_factor_without_a_common_refinement_are_fixed_and_say_so() -> None:
    a, b = Product((Atom(3), Atom(4))), Product((Atom(4), Atom(3)))
    unify(a, b)
    assert free_atoms(a) == free_atoms(b) == []
    assert why_fixed(a) == "no common refinement of (3×4) and (4×3)"


def test_factors_that_are_staggered_share_what_both_divide_into() -> None:
    a, b = Product((Atom(4), Atom(6))), Product((Atom(6), Atom(4)))
    unify(a, b)
    assert repr(resolve(a)) == repr(resolve(b)) == "(2×!6×2)"
    assert why_fixed(a) == "no common refinement of (4×6) and (6×4)"


def test_a_part_that_ends_inside_a_row_cuts_the_row() -> None:
    groups, channels, first, second = Atom(2), Atom(4), Atom(3), Atom(5)
    unify(Product((groups, channels)), Concat((first, second)))
    assert [repr(resolve(each)) for each in (groups, channels, first, second)] == ["!2", "(3+1)", "3", "(1+3+1)"]
    assert why_fixed(groups) == "a part of (3+5) ends inside a row of (2×4)"
    assert free_atoms(channels) == free_atoms(first) == free_atoms(second)


def test_rows_apart_from_the_one_that_is_cut_stay_free() -> None:
    rows = Atom(9)
    unify(Product((rows, Atom(4))), Concat((Atom(18), Atom(18))))
    assert repr(resolve(rows)) == "(4+1+4)"


def test_what_follows_the_next_common_boundary_is_still_refined() -> None:
    tail = Atom(5)
    a, b = Product((Atom(3), Atom(4), tail)), Product((Atom(4), Atom(3), Atom(5)))
    unify(a, b)
    assert free_atoms(a) == free_atoms(b) == [resolve(tail)]


def test_an_axis_split_unevenly_keeps_a_part_free() -> None:
    width = Atom(7)
    head, tail = split(width, 3)
    fix(head, "a literal")
    assert repr(resolve(width)) == "(!3+4)"
    assert free_atoms(width) == [tail]
    assert why_fixed(width) == "a literal"


def test_the_first_reason_stays() -> None:
    axis = Atom(3)
    fix(axis, "first")
    fix(axis, "second")
    assert axis.fixed == "first"


def test_sizes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="4 and 5"):
        unify(Atom(4), Atom(5))


def test_names_follow_an_axis_and_not_a_compound() -> None:
    a, b, c = Atom(4), Atom(4), Atom(4)
    hint(a, "heads", "kv heads", "query heads")
    unify(a, b)
    assert list(next(atoms(b)).hints) == [("heads", "kv heads", "query heads")]
    factor(b, 2)
    unify(b, c)
    assert [list(atom.hints) for atom in atoms(c)] == [[("kv heads",)], [("query heads",)]]


def test_empty_and_single_positions() -> None:
    assert constant(resolve(Atom(1)))
    assert keep_mask(Atom(1), {}).tolist() == [True]
    assert keep_mask(Atom(0), {}).tolist() == []
    assert [piece.size for piece in pieces(Atom(5), [0, 5, 0])] == [0, 5, 0]
    assert size_after(Product(()), {}) == 1
    unify(Product((Atom(0), Atom(3))), Atom(0))
