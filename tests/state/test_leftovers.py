"""After a trace, one that failed too, nothing of it is left anywhere; verification leaves nothing either."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from secateur.compat import FakeTensor
from secateur.sizes.size import Size
from secateur.state.leftovers import let_go
from state import caching_code
from state.reachable import reachable

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
MINE = torch.ones(1)

CACHE: dict[Any, Any] = {"mine": MINE}
NESTED: dict[str, Any] = {"inner": {}, "list": [1]}
SEEN: list[Any] = ["mine"]
QUEUE: deque[Any] = deque()
LAST: Any = None


class Config:
    """An object at the level of the module."""

    table: Any = None


CONFIG = Config()


@functools.cache
def here(n: int) -> Tensor:
    return torch.arange(n).float()


class Caching(nn.Module):
    """A model whose forward fills caches everywhere."""

    kept: dict[str, Any] = {}  # noqa: RUF012
    last: Any = None

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.width, self.fail = 8, fail
        self.cache: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        global LAST
        n = x.shape[1]
        h = self.a(x + here(n) + caching_code.remembered(n) + caching_code.table(n))
        CACHE[h.shape[1]] = h
        CACHE["mine"] = h
        NESTED["inner"]["h"], NESTED["shape"] = {"deep": h}, (h.shape[1],)
        NESTED["list"].append(self.width)
        SEEN.append(h.shape)
        SEEN.append(self)
        QUEUE.append(h)
        CONFIG.table = LAST = Caching.last = Caching.kept["h"] = self.cache["h"] = self.late = h
        h = h.reshape(-1, caching_code.sizes(self.width)[0])
        if self.fail:
            raise RuntimeError("midway")
        return self.b(h)


def surroundings() -> Any:
    caches = [f.cache_info().currsize for f in (here, caching_code.remembered, caching_code.sizes)]
    held = [CACHE, NESTED, SEEN, list(QUEUE), dict(caching_code.TABLES), dict(Caching.kept)]
    return repr(held), LAST, Caching.last, CONFIG.table, caches, CACHE["mine"] is MINE


def of_a_run() -> list[Any]:
    """What only a tracing run makes, and what is still there."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) in (FakeTensor, Size)]


@pytest.mark.parametrize("fail", [False, True], ids=["succeeds", "fails"])
def test_nothing_is_left_in_any_cache(fail: bool) -> None:
    net = Caching(fail)
    before, around, others = reachable(net), surroundings(), {id(each) for each in of_a_run()}
    if fail:
        with pytest.raises(sec.TraceError, match="midway"):
            sec.trace(net, X)
    else:
        assert sec.trace(net, X).axes
    assert reachable(net) == before
    assert surroundings() == around
    assert [each for each in of_a_run() if id(each) not in others] == []


def test_what_the_user_cached_before_stays() -> None:
    mine = caching_code.table(5), caching_code.remembered(5)
    CACHE["other"] = mine
    sec.trace(Caching(), X)
    assert CACHE.pop("other") is mine
    assert caching_code.TABLES.pop(5) is mine[0]
    caching_code.remembered.cache_clear()


def test_a_tensor_of_the_users_is_as_it_was() -> None:
    table = torch.ones(8)

    class Outside(Caching):
        def forward(self, x: Tensor) -> Tensor:
            table.add_(0)
            return self.b(self.a(x) + table)

    sec.trace(Outside(), X)
    assert vars(table) == {}
    assert table.tolist() == [1] * 8


def test_a_closure_lets_go_too() -> None:
    cache: dict[str, Any] = {}

    class Closed(Caching):
        def forward(self, x: Tensor) -> Tensor:
            cache["h"] = self.a(x)
            return self.b(cache["h"])

    net = Closed()
    sec.trace(net, X)
    assert cache == {}


def test_verification_leaves_nothing() -> None:
    net = Caching()
    plan = sec.plan(sec.trace(net, X), sec.Ratio(0.5))
    around = surroundings()
    sec.apply(net, plan)
    del NESTED["shape"], NESTED["list"][1:]  # plain numbers stay, and what other Python modules hold
    caching_code.remembered.cache_clear()
    caching_code.sizes.cache_clear()
    caching_code.TABLES.clear()
    assert surroundings() == around


class Recorder:
    """What people write to look into a model."""

    def __init__(self) -> None:
        self.shapes: list[Any] = []

    def hook(self, _module: nn.Module, _args: Any, out: Tensor) -> None:
        self.shapes.append(out.shape)


FEATURES: dict[str, Any] = {"mine": MINE}
COUNT = 0


def test_what_hooks_write_to_is_as_it_was() -> None:
    global COUNT
    seen, recorder, COUNT = list[Any](), Recorder(), 3

    def keep(out: Tensor) -> None:
        FEATURES["mine"] = FEATURES[str(out.shape)] = out

    def hook(_module: nn.Module, args: Any, out: Tensor) -> None:
        global COUNT
        seen.append(args)
        recorder.shapes.append(out.shape)
        keep(out)
        COUNT += 1

    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    net[0].register_forward_hook(hook)
    net[2].register_forward_hook(functools.partial(hook))
    net[2].register_forward_hook(recorder.hook)
    sec.apply(net, sec.plan(sec.trace(net, X), sec.Ratio(0.5)))
    assert (seen, recorder.shapes, FEATURES, COUNT) == ([], [], {"mine": MINE}, 3)
    net(X)
    assert (len(seen), len(recorder.shapes), COUNT) == (2, 3, 5)
    assert [tuple(args[0].shape) for args in seen] == [(4, 6), (4, 4)]


def test_looking_for_holders_ends_while_others_make_new_ones() -> None:
    """Another thread wraps what a run made into ever new containers."""
    kept = [torch.zeros(1)]
    made: list[weakref.ref[Any]] = [weakref.ref(kept[0])]
    done = threading.Event()

    def wrap() -> None:
        around: Any = kept
        while not done.is_set():
            around = [around]

    thread = threading.Thread(target=wrap)
    thread.start()
    try:
        let_go(made)
    finally:
        done.set()
        thread.join()
    assert kept == []
