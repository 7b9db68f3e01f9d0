"""What any sequence of learning leaves true."""

from __future__ import annotations

import os
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Program, State, build, kept_by_slicing, programs, random_masks, run

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

EXAMPLES = int(os.environ.get("SECATEUR_EXAMPLES", "100"))
SEEDS = st.integers(0, 2**16)
Tied = frozenset[frozenset[frozenset[tuple[int, int]]]]


@settings(max_examples=EXAMPLES, deadline=None)
@given(programs(), SEEDS)
def test_whatever_is_learnt_sizes_stay_and_equal_layouts_keep_the_same(program: Program, seed: int) -> None:
    state = run(program)
    masks = random_masks(state.variables, seed)
    for size, variable in zip(program.sizes, state.variables, strict=True):
        assert resolve(variable).size == size
        assert len(keep_mask(variable, masks)) == size
    for left, right in program.equal:
        a, b = (keep_mask(build(tree, state.variables), masks) for tree in (left, right))
        assert a.tolist() == b.tolist()


@settings(max_examples=EXAMPLES, deadline=None)
@given(programs(), SEEDS)
def test_what_is_fixed_stays_whole(program: Program, seed: int) -> None:
    state = run(program)
    masks = random_masks(state.variables, seed)
    for variable in program.fixed:
        assert keep_mask(state.variables[variable], masks).all()
        assert free_atoms(state.variables[variable]) == []


@settings(max_examples=EXAMPLES, deadline=None)
@given(programs(), SEEDS)
def test_the_order_of_learning_does_not_matter(program: Program, seed: int) -> None:
    """Where a common refinement exists, every order finds it; where not, every order stays sound."""
    order = list(range(len(program.steps())))
    random.Random(seed).shuffle(order)
    first, second = run(program), run(program, order)
    if first.gave_up or second.gave_up:
        masks = random_masks(second.variables, seed)
        for left, right in program.equal:
            a, b = (keep_mask(build(tree, second.variables), masks) for tree in (left, right))
            assert a.tolist() == b.tolist()
    else:
        assert tied(first) == tied(second)


def tied(state: State) -> Tied:
    """The axes that may be cut, each as its positions, each as all places (variable, position) that go with it."""
    axes: dict[Atom, list[set[tuple[int, int]]]] = {}
    for v, variable in enumerate(state.variables):
        for atom, index in positions(variable):
            if atom.fixed is None:
                found = axes.setdefault(atom, [set() for _ in range(atom.size)])
                for place, position in enumerate(index):
                    if position >= 0:
                        found[position].add((v, place))
    return frozenset(frozenset(frozenset(places) for places in axis) for axis in axes.values())


@settings(max_examples=EXAMPLES, deadline=None)
@given(programs(kinds=("concat",)))
def test_splits_and_concatenations_tie_exactly_what_they_must(program: Program) -> None:
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
    for axis in tied(run(program)):
        for position in axis:
            assert set(position) == together[find(next(iter(position)))]


@settings(max_examples=EXAMPLES, deadline=None)
@given(programs(), SEEDS)
def test_a_mask_selects_what_slicing_the_grid_of_positions_selects(program: Program, seed: int) -> None:
    state = run(program)
    masks = random_masks(state.variables, seed)
    for variable in state.variables:
        assert np.flatnonzero(keep_mask(variable, masks)).tolist() == kept_by_slicing(variable, masks).tolist()


@settings(max_examples=EXAMPLES, deadline=None)
@given(programs(), SEEDS)
def test_positions_and_size_after_agree_with_the_mask(program: Program, seed: int) -> None:
    state = run(program)
    masks = random_masks(state.variables, seed)
    counts = {atom: int(mask.sum()) for atom, mask in masks.items()}
    for variable in state.variables:
        mask = keep_mask(variable, masks)
        assert size_after(variable, counts) == mask.sum()
        stays = np.ones(variable.size, np.bool_)
        for atom, index in positions(variable):
            if atom in masks:
                stays &= np.where(index < 0, True, masks[atom][index])
        assert stays.tolist() == mask.tolist()


@settings(max_examples=EXAMPLES, deadline=None)
@given(programs())
def test_learning_the_same_again_changes_nothing(program: Program) -> None:
    state = run(program)
    before = tied(state)
    shown = [repr(resolve(variable)) for variable in state.variables]
    for left, right in program.equal:
        unify(build(left, state.variables), build(right, state.variables))
    assert tied(state) == before
    assert [repr(resolve(variable)) for variable in state.variables] == shown


@settings(max_examples=EXAMPLES, deadline=None)
@given(programs(), SEEDS)
def test_notes_reach_every_part(program: Program, seed: int) -> None:
    """Whether said before or after, inexactness holds for all that a layout turns out to be made of."""
    steps = program.steps()
    early, late = (State([Atom(n) for n in program.sizes]) for _ in range(2))
    note(early.variables[0], "why")
    for state in (early, late):
        for kind, what in steps:
            if kind == "equal":
                left, right = what  # type: ignore[misc]
                unify(build(left, state.variables), build(right, state.variables))
    note(late.variables[0], "why")
    for state in (early, late):
        for atom in free_atoms(state.variables[0]):
            assert list(atom.notes) == ["why"]


@settings(max_examples=EXAMPLES, deadline=None)
@given(programs())
def test_the_normal_form_is_flat(program: Program) -> None:
    """No part of a part's own kind, no two constants side by side, nothing with a single part, nothing bound."""
    todo: list[Layout] = [resolve(variable) for variable in run(program).variables]
    while todo:
        layout = todo.pop()
        if isinstance(layout, Atom):
            assert layout.bound is None
            continue
        assert len(layout.parts) != 1
        assert not any(type(part) is type(layout) for part in layout.parts)
        assert not any(constant(a) and constant(b) for a, b in pairwise(layout.parts))
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
    hint(a, "heads")
    unify(a, b)
    assert list(next(atoms(b)).hints) == ["heads"]
    factor(b, 2)
    unify(b, c)
    assert all("heads" not in atom.hints for atom in atoms(c))


def test_empty_and_single_positions() -> None:
    assert constant(resolve(Atom(1)))
    assert keep_mask(Atom(1), {}).tolist() == [True]
    assert keep_mask(Atom(0), {}).tolist() == []
    assert [piece.size for piece in pieces(Atom(5), [0, 5, 0])] == [0, 5, 0]
    assert size_after(Product(()), {}) == 1
    unify(Product((Atom(0), Atom(3))), Atom(0))
