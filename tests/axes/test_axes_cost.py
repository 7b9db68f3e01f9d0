"""What the algebra costs, counted in visits of layouts rather than in seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from secateur.axes import Atom, Concat, Layout, Product, layout, resolve, split, unify

Visits = Callable[[Callable[[], Any]], int]


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Visits:
    """How many layouts something resolves, parts of parts included."""
    original = layout.resolve
    count = 0

    def counting(what: Layout) -> Layout:
        nonlocal count
        count += 1
        return original(what)

    monkeypatch.setattr(layout, "resolve", counting)
    monkeypatch.setattr(sys.modules["secateur.axes.learn"], "resolve", counting)

    def measure(action: Callable[[], Any]) -> int:
        nonlocal count
        count = 0
        action()
        return count

    return measure


def densely_connected(layers: int) -> None:
    """Each layer normalises and mixes all features so far, and adds some."""
    features: Layout = Atom(4)
    for _ in range(layers):
        for _ in range(5):  # weight, bias, mean, variance of the norm; input channels of the convolution
            unify(features, Atom(features.size))
        features = resolve(Concat((features, Atom(4))))


def all_at_once(layers: int) -> None:
    """The same, with every layer concatenating the list of all outputs so far."""
    outputs: list[Layout] = [Atom(4)]
    for _ in range(layers):
        features = resolve(Concat(tuple(outputs)))
        for _ in range(5):
            unify(features, Atom(features.size))
        outputs.append(Atom(4))


@pytest.mark.parametrize("network", [densely_connected, all_at_once])
def test_growing_concatenations_cost_no_more_than_their_total_length(
    network: Callable[[int], None], visits: Visits
) -> None:
    """200 layers have 20,000 features to look at; twice the layers, four times the features."""
    half, whole = visits(lambda: network(100)), visits(lambda: network(200))
    assert whole < 5 * half
    assert whole < 40 * sum(range(200))


def test_unifying_equal_concatenations_again_costs_one_look_at_each_part(visits: Visits) -> None:
    parts = tuple(Atom(3) for _ in range(200))
    a, b = Concat(parts), Concat(parts)
    unify(a, b)
    assert visits(lambda: unify(a, b)) < 4 * len(parts)


def staggered(parts: int) -> None:
    """No part of one side ends where a part of the other does."""
    fours = [tuple(Atom(4) for _ in range(parts)) for _ in range(2)]
    unify(Concat((Atom(2), *fours[0])), Concat((*fours[1], Atom(2))))


def one_against_many(parts: int) -> None:
    """One long axis on each side is made of all the short ones of the other."""
    a = (Atom(4 * parts), *(Atom(5) for _ in range(parts)))
    b = (*(Atom(4) for _ in range(parts)), Atom(5 * parts))
    unify(Concat(a), Concat(b))


def rows_of_a_product(parts: int) -> None:
    """Every row is a part, and every second one is cut."""
    unify(Product((Atom(2 * parts), Atom(6))), Concat(tuple(Atom(n) for _ in range(parts) for n in (6, 2, 4))))


@pytest.mark.parametrize("sides", [staggered, one_against_many, rows_of_a_product])
def test_unifying_long_concatenations_costs_no_more_than_their_length(
    sides: Callable[[int], None], visits: Visits
) -> None:
    assert visits(lambda: sides(2000)) < 2.5 * visits(lambda: sides(1000))


def test_however_long_a_chain_of_what_is_the_same_its_end_is_found() -> None:
    chain = [Atom(3) for _ in range(5000)]
    for a, b in pairwise(chain):
        unify(a, b)
    assert resolve(chain[0]) is resolve(chain[-1])


def test_however_often_the_first_part_is_taken_off_the_whole_is_flat() -> None:
    whole = Atom(2 * 3000)
    rest: Layout = whole
    for _ in range(2999):
        rest = split(rest, 2)[1]
    made = resolve(whole)
    assert isinstance(made, Concat)
    assert len(made.parts) == 3000
