"""Random networks, cut at random: the cut must be right by the library's own oracle and by an independent one.

`SECATEUR_FUZZ=N` runs N new examples of each kind instead of the few that every test run has (`kept`).
"""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from hypothesis import note
from hypothesis import strategies as st
from torch import nn

import secateur as sec
from fuzz import image_blocks, networks, sequence_blocks
from kept import drawn
from oracle import difference, each_axis, outputs, randomised, zeroed

pytestmark = pytest.mark.filterwarnings("ignore:the plan cuts nothing")  # as random cuts may
KNOB = st.integers(0, 59)


def blocks(home: Any) -> st.SearchStrategy[Any]:
    simple = st.tuples(st.sampled_from(sorted(home.BLOCKS)), KNOB)

    def wrap(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.tuples(st.sampled_from(sorted(home.WRAPPERS)), KNOB, st.lists(inner, min_size=1, max_size=3))

    return st.lists(st.recursive(simple, wrap, max_leaves=4), min_size=1, max_size=5)


CUTS = st.fixed_dictionaries(
    {
        "ratio": st.sampled_from([0.5, 0.25, 0.75, 0.9]),
        "seed": st.integers(0, 99),
        "exact": st.booleans(),
        "round_to": st.sampled_from([1, 1, 1, 2, 4]),
    }
)


def check(build: str, stem: int, body: Any, head: int, cut: dict[str, Any]) -> None:
    note(f"networks.{build}({stem}, {body}, {head})  cut {cut}")
    torch.manual_seed(0)
    net, example = getattr(networks, build)(stem, body, head)
    big = randomised(net)
    small = copy.deepcopy(big)
    graph = sec.trace(small, example, variants=False)
    assert not graph.unknown, graph.unknown
    keywords = {key: cut[key] for key in ("exact", "round_to")}
    plan = sec.plan(graph, each_axis(graph, cut["ratio"]), importance=sec.Random(cut["seed"]), **keywords)
    sec.apply(small, plan)
    agrees(big, small, plan, example)
    trains(small, example)


def check_refitted(build: str, stem: int, body: Any, head: int, cut: dict[str, Any]) -> None:
    """Rank by data, cut, refit: the outputs on the data are no further off than without, and all shapes are right."""
    note(f"networks.{build}({stem}, {body}, {head})  refitted {cut}")
    torch.manual_seed(0)
    net, example = getattr(networks, build)(stem, body, head)
    big = randomised(net)
    small, plain, batches = copy.deepcopy(big), copy.deepcopy(big), [example, example]
    keywords = {key: cut[key] for key in ("exact", "round_to")}
    graph = sec.trace(small, example, variants=False)
    plan = sec.plan(graph, each_axis(graph, cut["ratio"]), importance=sec.Reconstruction(batches), **keywords)
    compensate = sec.LeastSquares(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sec.SecateurWarning)  # that all was taken back
        sec.apply(small, plan, compensate=compensate)
    sec.apply(plain, plan)
    want = outputs(big, example)
    off = [
        sum((a - b).square().sum().item() for a, b in zip(outputs(model, example), want, strict=True))
        for model in (small, plain)
    ]
    assert off[0] <= off[1] * (1 + 1e-5) + 1e-8 * sum(b.square().sum().item() for b in want), str(sec.outcome(small))
    trains(small, example)


def check_zeros(build: str, stem: int, body: Any, head: int, cut: dict[str, Any]) -> None:
    """Zero the slices of a random choice of what a cut would remove: what `Zeros` then removes changes no output."""
    note(f"networks.{build}({stem}, {body}, {head})  zeros {cut}")
    torch.manual_seed(0)
    net, example = getattr(networks, build)(stem, body, head)
    big = randomised(net)
    graph = sec.trace(big, example, variants=False)
    plan = sec.plan(graph, each_axis(graph, cut["ratio"]), importance=sec.Random(cut["seed"]))
    coin = random.Random(cut["seed"])
    some = {
        name: {dim: index for dim, index in dims.items() if coin.random() < 0.8}
        for name, dims in plan.kept_everywhere().items()
        if not name.endswith("running_var")
    }
    big = zeroed(big, some)
    small = copy.deepcopy(big)
    zeros = sec.plan(sec.trace(small, example, variants=False), sec.Zeros(), round_to=cut["round_to"])
    sec.apply(small, zeros)
    assert difference(outputs(small, example), outputs(big, example)) < 1e-9


def agrees(big: nn.Module, small: nn.Module, plan: sec.Plan, example: Any) -> None:
    """What can be said without the library: shapes, counts and, of an exact cut, the numbers."""
    assert sum(p.numel() for p in small.parameters()) == plan.params.after
    for name, tensor in small.state_dict().items():
        want = list(big.state_dict()[name].shape)
        for dim, index in plan.keep.get(name, {}).items():
            want[dim] = len(index)
        assert list(tensor.shape) == want, name
    got = outputs(small, example)
    assert all(torch.isfinite(t).all() for t in got)
    if all(axis.exact for axis in plan.axes):
        assert difference(got, outputs(zeroed(big, plan.kept_everywhere()), example)) < 1e-9


def trains(small: nn.Module, example: Any) -> None:
    """A gradient reaches the first layer of the cut model."""
    small.train()
    for module in small.modules():
        if hasattr(module, "inplace"):  # torch itself cannot go back through some sequences of these
            module.inplace = False
    small(example).square().sum().backward()
    first = next(small.parameters())
    assert first.grad is not None
    assert first.grad.shape == first.shape


@drawn(30, stem=KNOB, body=blocks(image_blocks), head=KNOB, cut=CUTS)
def test_image_networks(stem: int, body: Any, head: int, cut: dict[str, Any]) -> None:
    check("image", stem, body, head, cut)


@drawn(30, stem=KNOB, body=blocks(sequence_blocks), head=KNOB, cut=CUTS)
def test_sequence_networks(stem: int, body: Any, head: int, cut: dict[str, Any]) -> None:
    check("sequence", stem, body, head, cut)


@drawn(15, stem=KNOB, body=blocks(image_blocks), head=KNOB, cut=CUTS)
def test_zeros_in_image_networks(stem: int, body: Any, head: int, cut: dict[str, Any]) -> None:
    check_zeros("image", stem, body, head, cut)


@drawn(15, stem=KNOB, body=blocks(sequence_blocks), head=KNOB, cut=CUTS)
def test_zeros_in_sequence_networks(stem: int, body: Any, head: int, cut: dict[str, Any]) -> None:
    check_zeros("sequence", stem, body, head, cut)


@drawn(8, stem=KNOB, body=blocks(image_blocks), head=KNOB, cut=CUTS)
def test_refitted_image_networks(stem: int, body: Any, head: int, cut: dict[str, Any]) -> None:
    check_refitted("image", stem, body, head, cut)


@drawn(8, stem=KNOB, body=blocks(sequence_blocks), head=KNOB, cut=CUTS)
def test_refitted_sequence_networks(stem: int, body: Any, head: int, cut: dict[str, Any]) -> None:
    check_refitted("sequence", stem, body, head, cut)
