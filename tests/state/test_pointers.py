"""What points at an object is made to point at the one in its place; what does not is left as it is."""

from __future__ import annotations

import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torch import nn

from secateur.state.held import Place
from secateur.state.own import own_what_is_written
from secateur.state.pointers import Redirection


class Table:
    """Something that others may point at."""

    def __init__(self, width: int) -> None:
        self.width = width

    def read(self, times: int = 1) -> int:
        return times * self.width


class Pair(NamedTuple):
    name: str
    read: Any


def closing_over(table: Table) -> Any:
    def read() -> int:
        return table.width

    read.table = table  # type: ignore[attr-defined]
    return read


def by_default(table: Table) -> Any:
    def read(given: Table = table, *, other: Table = table) -> int:
        return (given.width + other.width) // 2

    return read


WAYS = {
    "closure": closing_over,
    "defaults": by_default,
    "method": lambda table: table.read,
    "partial": lambda table: partial(Table.read, table, times=1),
    "keyword of a partial": lambda table: partial(lambda table: table.width, table=table),
    "weak reference": lambda table: weakref.ref(table),
    "list": lambda table: [table.read, 3],
    "named tuple": lambda table: Pair("x", table.read),
    "closure over a dict": lambda table: (lambda held: lambda: held["table"].width)({"table": table}),
}


def width(found: Any) -> Any:
    """What is read through something that points at a table."""
    found = found[0] if isinstance(found, list) else found.read if isinstance(found, Pair) else found()
    found = found() if callable(found) else found
    return getattr(found, "width", found)


@pytest.mark.parametrize("way", WAYS)
def test_pointers_follow(way: str) -> None:
    old, new, other = Table(4), Table(2), Table(7)
    redirection = Redirection()
    redirection.remember(old, new)
    pointer, stranger = WAYS[way](old), WAYS[way](other)
    assert width(redirection.pointed(pointer)) == 2
    assert width(pointer) == 4
    assert redirection.pointed(stranger) is stranger


def test_a_weak_method_is_left_alone() -> None:
    old, new = Table(4), Table(2)
    redirection = Redirection()
    redirection.remember(old, new)
    weak = weakref.WeakMethod(old.read)
    assert redirection.pointed(weak) is weak


def test_what_a_closure_leads_to_is_owned_with_it() -> None:
    net, config = nn.Linear(2, 2), SimpleNamespace(width=4)
    net.config, net.read, net.table = config, partial(getattr, config, "width"), {"read": closing_over(config)}
    own_what_is_written(net, [Place("", ("config", "width"))])
    net.config.width = 2
    assert (net.read(), net.table["read"](), config.width) == (2, 2, 4)
