"""Times between the sizes that were measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.timing.surface import GRAINS, Bulk, Surface, grain, knots, monotone, probes, rounded

times = st.floats(1e-6, 1.0)


@st.composite
def grids(draw: st.DrawFn) -> Surface:
    """Surfaces of one or two sizes, from any timings."""
    ks = tuple(tuple(sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=4)))) for _ in range(2))
    ks = ks[: draw(st.integers(1, 2))]
    flat = draw(st.lists(times, min_size=int(np.prod([len(k) for k in ks])), max_size=16))
    grid = np.array(flat[: int(np.prod([len(k) for k in ks]))]).reshape([len(k) for k in ks])
    return Surface(ks, monotone(grid), tuple(draw(st.sampled_from(GRAINS)) for _ in ks))


@settings(max_examples=100, deadline=None)
@given(surface=grids(), data=st.data())
def test_more_never_takes_less(surface: Surface, data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 220)) for _ in surface.knots]
    more = [n + data.draw(st.integers(0, 40)) for n in sizes]
    assert surface(more) >= surface(sizes) - 1e-12
    assert surface.times.min() - 1e-12 <= surface(sizes) <= surface.times.max() + 1e-12


def test_what_was_measured_comes_out_again() -> None:
    grid = np.array([[1.0, 2.0, 4.0], [3.0, 5.0, 9.0]])
    surface = Surface(((8, 32), (8, 16, 64)), grid, (1, 1))
    for i, j in itertools.product(range(2), range(3)):
        assert surface((surface.knots[0][i], surface.knots[1][j])) == grid[i, j]
    assert surface((20, 8)) == pytest.approx(2.0)  # halfway
    assert surface((20, 12)) == pytest.approx((1 + 2 + 3 + 5) / 4)  # in the middle of four
    assert surface((1, 1)) == 1.0
    assert surface((99, 99)) == 9.0


def test_steps_are_flat_up_to_the_multiple() -> None:
    surface = Surface(((16, 32, 64),), np.array([1.0, 2.0, 4.0]), (16,))
    assert [surface((n,)) for n in (16, 17, 31, 32, 33, 48, 49, 64)] == [1, 2, 2, 2, 3, 3, 4, 4]


def test_nothing_varies() -> None:
    assert Surface((), np.array(0.5), ())(()) == 0.5


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 5000), count=st.integers(1, 6))
def test_knots(size: int, count: int) -> None:
    found = knots(size, count)
    assert list(found) == sorted(set(found))
    assert found[-1] == size
    assert found[0] >= 1
    assert len(found) <= max(count, 2)


@pytest.mark.parametrize("true", GRAINS)
@pytest.mark.parametrize("size", [64, 96, 512])
def test_the_grain_is_found_through_noise(true: int, size: int) -> None:
    noise = np.random.default_rng(true + size).uniform(1.0, 1.01, 7)
    assert grain({n: (5 + rounded(n, true)) * noise[i] for i, n in enumerate(probes(size))}) == true


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_mere_noise_seldom_makes_a_step(seed: int) -> None:
    """Flat times with noise, where any answer changes nothing: what is found must not raise a prediction."""
    noise = np.random.default_rng(seed).uniform(1.0, 1.02, 7)
    found = grain(dict(zip(probes(256), noise.tolist(), strict=True)))
    surface = Surface(((8, 128, 256),), np.array([1.0, 1.0, 1.0]), (found,))
    assert surface((100,)) == 1.0


@pytest.mark.parametrize("size", [64, 65, 100, 128, 1000])
def test_probes_are_inside(size: int) -> None:
    found = probes(size)
    assert found[-1] <= size
    assert found[0] >= 1
    assert found[-1] - found[0] == 32


def test_by_number_of_elements() -> None:
    bulk = Bulk(sum, (10, 20), (1.0, 2.0))
    assert [bulk((n, 5)) for n in (1, 5, 10, 15, 99)] == [1.0, 1.0, 1.5, 2.0, 2.0]
