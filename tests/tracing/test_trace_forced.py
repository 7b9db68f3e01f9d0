"""Branches that no run has taken, taken by force: which they are, and that functions are as they were afterwards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from secateur.tracing.forced import Forced, forced
from secateur.tracing.questions import branches

X = torch.randn(2, 6)
ASKED = {"now": False}


class Two(nn.Module):
    """Two layers, and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(torch.relu(self.a(x))))

    def between(self, h: Tensor) -> Tensor:
        return h


def whole(model: nn.Module) -> bool:
    """Whether the first layer stays as it is."""
    return "a.weight" not in {site.tensor for axis in sec.trace(model, X).axes for site in axis.sites}


def paths(function: Any, kind: type = object) -> dict[str, Forced]:
    return {branch.test: Forced(function, branch) for branch in branches(function, kind)}


def steps(x: Tensor, often: bool) -> list[str]:
    """A function that says which way it went."""
    went = []
    while x.shape[0] > 99:
        went.append("loop")
        x = x.reshape(-1)[:1]
    if often:
        went.append("often")
        x = x[:1].reshape(1, -1)
    elif len(x) > 99:
        went.append("long")
        x = torch.cat([x.reshape(-1)[:1], x.reshape(-1)[:1]]) if x.sum() > 1e9 else x.reshape(-1)
    if not often:
        return went
    return [*went, "after", *(["chosen"] if x.reshape(1, -1).shape[1] > 99 else [])]


def test_each_branch_is_come_to_and_loops_end() -> None:
    found = paths(steps)
    code = steps.__code__
    for test, went in {
        "if x.shape[0] > 99": ["loop"],
        "if often": ["often"],
        "if len(x) > 99": ["long"],
        "if x.sum() > 1000000000.0": ["long"],
        "unless not often": ["after"],
    }.items():
        with forced([found[test]]) as taken:
            assert steps(X, False) == went
        assert taken == {found[test]}
    assert steps.__code__ is code
    assert steps(X, False) == []


def test_branches_that_exclude_each_other_do_not_fit_into_one_run() -> None:
    found = paths(steps)
    assert found["if often"].fits([found["if x.shape[0] > 99"]])
    assert not found["if often"].fits([found["if len(x) > 99"]])


def test_what_is_not_come_to_is_not_taken() -> None:
    found = paths(steps)
    with forced([found["if len(x) > 99"]]) as taken:
        pass
    assert not taken


def test_other_threads_go_their_own_way() -> None:
    went = []
    with forced([paths(steps)["if often"]]):
        thread = threading.Thread(target=lambda: went.append(steps(X, False)))
        thread.start()
        thread.join()
        assert steps(X, False) == ["often"]
    assert went == [[]]


def test_a_function_is_as_it_was_if_the_run_fails() -> None:
    code = steps.__code__
    with pytest.raises(ZeroDivisionError), forced([paths(steps)["if often"]]):
        raise ZeroDivisionError
    assert steps.__code__ is code


def test_a_loop_that_would_never_end_ends() -> None:
    def endless(x: Tensor, done: bool) -> int:
        turns = 0
        while True:
            turns += 1
            if done:
                break
            x = torch.cat([x[:, 3:], x[:, :3]], 1)
        return turns

    with forced([paths(endless)["unless done"]]):
        assert endless(torch.zeros(1, 4), True) > 1


def test_what_calls_itself_ends() -> None:
    class Again(Two):
        def between(self, h: Tensor) -> Tensor:
            if ASKED["now"]:
                return torch.cat([self.between(h[:, 4:]), h[:, :4]], 1)
            return h

    assert whole(Again())
    assert not sec.trace(Again(), X).unseen


def test_closures_private_names_and_the_class_before_are_what_they_were() -> None:
    turns = [4]

    def turned(h: Tensor) -> Tensor:
        return h.roll(turns[0], 1) if ASKED["now"] else h

    class Closed(Two):
        def __init__(self) -> None:
            super().__init__()
            self.__turn = turned

        def between(self, h: Tensor) -> Tensor:
            return super().between(self.__turn(h))

    class Private(Two):
        def between(self, h: Tensor) -> Tensor:
            return Private.__halves(super().between(h)) if ASKED["now"] else h

        @staticmethod
        def __halves(h: Tensor) -> Tensor:
            return torch.cat([h[:, 4:], h[:, :4]], 1)

    assert whole(Closed())
    assert whole(Private())


def test_one_that_may_do_more_than_compute_is_told_and_not_taken(tmp_path: Path) -> None:
    class Writes(Two):
        def between(self, h: Tensor) -> Tensor:
            if ASKED["now"]:
                torch.save(h[:, :4], tmp_path / "h.pt")
            return torch.relu(h)

    graph = sec.trace(Writes(), X)
    assert not list(tmp_path.iterdir())
    assert [one.what for one in graph.unseen] == ["what the code does if ASKED['now']"]


def test_nor_is_what_is_within_one_that_may_do_more(tmp_path: Path) -> None:
    class Writes(Two):
        def between(self, h: Tensor) -> Tensor:
            if ASKED["now"]:
                (tmp_path / "h.txt").write_text("here")
                if h.shape[0] == 77:
                    h = torch.cat([h[:, 4:], h[:, :4]], 1)
            return torch.relu(h)

    sec.trace(Writes(), X)
    assert not list(tmp_path.iterdir())


def after_an_error(_model: nn.Module, h: Tensor) -> Tensor:
    try:
        return torch.relu(h)
    except (RuntimeError, TypeError):
        return torch.relu(h).roll(4, 1)


def by_a_case(_model: nn.Module, h: Tensor) -> Tensor:
    match ASKED:
        case {"now": True}:
            h = h.view(-1, 2, 4).flip(1).flatten(1)
    return h


def by_and(_model: nn.Module, h: Tensor) -> Tensor:
    other = ASKED["now"] and torch.cat([h[:, 4:], h[:, :4]], 1)
    return h if other is False else other


def in_a_loop(_model: nn.Module, h: Tensor) -> Tensor:
    for _ in range(int(ASKED["now"])):
        h = torch.cat([h[:, 4:], h[:, :4]], 1)
    return h


@pytest.mark.parametrize("how", [after_an_error, by_a_case, by_and, in_a_loop])
def test_other_ways_to_a_branch(how: Any) -> None:
    class Ways(Two):
        between = how

    assert whole(Ways())


def test_a_number_that_is_picked_is_seen_both_ways() -> None:
    class Picks(Two):
        def between(self, h: Tensor) -> Tensor:
            end = 4 if ASKED["now"] else None
            h = h.clone()
            h[:, :end].mul_(2)
            return h

    assert [axis.size for axis in sec.trace(Picks(), X).axes] == [4]  # the rest


def test_a_branch_of_a_method_beside_forward_is_taken_too() -> None:
    class Embeds(Two):
        def embed(self, x: Tensor, turn: bool = False) -> Tensor:
            h = torch.relu(self.a(x))
            if turn:
                h = torch.cat([h[:, 4:], h[:, :4]], 1)
            return self.b(h)

    assert whole(Embeds())


def test_one_that_these_weights_do_not_fit_keeps_nothing_whole() -> None:
    class Gated(Two):
        def between(self, h: Tensor) -> Tensor:
            if ASKED["now"]:
                first, second = h.chunk(2, 1)
                h = first * second
            return torch.relu(h)

    assert not whole(Gated())
    assert [one.what for one in sec.trace(Gated(), X).unseen] == ["what the code does if ASKED['now']"]
