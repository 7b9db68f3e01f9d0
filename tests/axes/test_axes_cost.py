"""What the algebra costs, counted in visits of layouts rather than in seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from secateur.axes import Atom, Concat, Layout, layout, resolve, unify

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
    monkeypatch.setattr(sys.modules["secateur.axes.unify"], "resolve", counting)

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
