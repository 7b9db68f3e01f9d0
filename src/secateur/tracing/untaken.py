"""Branches of the user's code that take tensors apart, and that no run has taken.

A branch that needs an input nobody thought of cannot be run, but it can be told: while the model runs, each call of a
torch function tells where the code around it is, and a branch within which no such place lies was not taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType

from secateur.tracing.questions import Branch, branches
from secateur.tracing.stated import functions_of, is_users

_MOST_READ = 1024  # classes whose code is remembered


def watched_codes(kinds: Iterable[type]) -> Iterator[CodeType]:
    """The code that has such branches."""
    for kind in kinds:
        yield from (code for code, _ in _branching(kind))


def untaken(kinds: Iterable[type], reached: Collection[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """What has to hold for the outermost of those branches that were not `reached`, and where they are."""
    told = set[str]()
    for kind in kinds:
        for code, every in _branching(kind):
            places = [*code.co_positions()]
            ran = {places[at // 2] for one, at in reached if one == id(code)}
            left = [branch for branch in every if ran and not any(_within(place, branch) for place in ran)]
            for branch in left:
                where = f"{Path(code.co_filename).name}:{branch.line}"
                if where not in told and not any(_inside(branch, other) for other in left):
                    told.add(where)
                    yield branch.test, where


@lru_cache(_MOST_READ)
def _branching(kind: type) -> tuple[tuple[CodeType, tuple[Branch, ...]], ...]:
    own = [f for base in kind.__mro__ if is_users(base) for f in functions_of(base) if f.__name__ != "__init__"]
    found = ((function.__code__, branches(function, kind)) for function in own)
    return tuple((code, every) for code, every in found if every)


def _within(place: tuple[int | None, int | None, int | None, int | None], branch: Branch) -> bool:
    line, _, column, _ = place
    return line is not None and column is not None and branch.span[0] <= (line, column) < branch.span[1]


def _inside(branch: Branch, other: Branch) -> bool:
    return branch is not other and other.span[0] <= branch.span[0] and branch.span[1] <= other.span[1]


__all__ = ["untaken", "watched_codes"]
