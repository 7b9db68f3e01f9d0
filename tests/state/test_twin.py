"""A twin shares no container with its model, is built alike, and runs in its place."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from secateur.state.held import Key, Walk
from secateur.state.twin import copied, in_place, run_apart, twin
from state.reachable import FrozenDict, reachable
from state.state_models import Frozen, Odd

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Pair(NamedTuple):
    first: Any
    second: Any


class Listing(list):
    """A list that refuses."""

    def append(self, _: Any) -> None:
        raise TypeError

    extend = __setitem__ = insert = append


class Holder(nn.Module):
    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.__dict__.update(held)


def same(value: Any, *_: Any) -> Any:
    return value


def twin_of(model: nn.Module) -> Any:
    return copied(model, lambda _: True)


def containers(*roots: Any) -> set[int]:
    """The ids of all mutable containers and modules that can be reached."""
    kinds = (dict, OrderedDict, defaultdict, list, set, deque, nn.Module, FrozenDict, Listing)
    return {entry[0] for entry in reachable(*roots) if issubclass(entry[1], kinds) and entry[1] is not tuple}


@pytest.mark.parametrize("model", [Frozen, Odd, lambda: nn.LSTM(2, 3), lambda: nn.TransformerEncoderLayer(4, 2)])
def test_nothing_is_shared_but_memory(model: Any) -> None:
    net = model()
    before = reachable(net)
    other = twin_of(net)
    assert reachable(net) == before
    assert containers(net) & containers(other) == set()
    assert [(name, type(module)) for name, module in other.named_modules()] == [
        (name, type(module)) for name, module in net.named_modules()
    ]
    assert list(map(list, map(vars, other.modules()))) == list(map(list, map(vars, net.modules())))
    pairs = list(zip(other.parameters(), net.parameters(), strict=True))
    assert all(a is not b and a.data_ptr() == b.data_ptr() and type(a) is type(b) for a, b in pairs)


def test_what_is_one_object_is_one_in_the_twin() -> None:
    shared: dict[str, Any] = {}
    shared["self"] = shared
    net = Holder(a=shared, b=[shared], c=(shared, 1), d=defaultdict(list, x=[shared]))
    net.again = net.layer
    net.parts = {"layer": net.layer, net.layer: "key"}
    other = twin_of(net)
    assert other.a is other.b[0] is other.c[0] is other.d["x"][0] is other.a["self"]
    assert other.a is not shared
    assert other.again is other.layer is other.parts["layer"]
    assert other.parts[other.layer] == "key"
    assert other.d.default_factory is list


def test_subclasses_of_containers_that_refuse() -> None:
    listing = Listing([1, [2]])
    listing.note = {"own": 1}
    queue: deque[Any] = deque([1, {}], maxlen=3)
    net = Holder(config=FrozenDict(width=2, inner={"a": 1}), listing=listing, queue=queue, pair=Pair(1, [2]))
    other = twin_of(net)
    assert type(other.config) is FrozenDict
    assert (other.config, other.config.width, list(other.config)) == (net.config, 2, ["width", "inner"])
    assert other.config["inner"] is not net.config["inner"]
    assert other.config.inner is other.config["inner"]
    assert type(other.listing) is Listing
    assert (list(other.listing), other.listing.note, other.listing.note is listing.note) == (
        [1, [2]],
        {"own": 1},
        False,
    )
    assert (other.queue, other.queue.maxlen, other.queue[1] is queue[1]) == (queue, 3, False)
    assert type(other.pair) is Pair


def test_what_points_at_the_model_points_at_the_twin() -> None:
    net = Holder()
    outside = [1]

    def closed(x: Any, default: Any = net, *, key: Any = net) -> Any:
        return net, default, key, outside

    net.method, net.closed, net.outside = net.extra_repr, closed, lambda: outside
    net.partial = functools.partial(getattr, net.layer)
    net.ref = weakref.ref(net.layer)
    net.bound = [net.layer._buffers.get]
    net.register_forward_hook(closed)
    other = twin_of(net)
    assert other.method.__self__ is other
    assert all(a is b for a, b in zip(other.closed(0), (other, other, other, outside), strict=True))
    assert other.outside is net.outside
    assert other.partial.args[0] is other.layer is other.ref()
    assert other.bound[0].__self__ is other.layer._buffers
    assert next(iter(other._forward_hooks.values()))(0)[0] is other
    assert closed(0)[0] is net


def test_opaque_things_are_shared() -> None:
    lock, local = threading.Lock(), threading.local()
    net = Holder(lock=lock, local=local, module=types, kind=int, error=ValueError("x"))
    other = twin_of(net)
    for name in ("lock", "local", "module", "kind", "error"):
        assert getattr(other, name) is getattr(net, name)


def test_a_twin_draws_from_a_generator_of_its_own() -> None:
    net = Holder(generator=torch.Generator())
    other = twin_of(net)
    before = net.generator.get_state()
    assert torch.equal(other.generator.get_state(), before)
    torch.rand(1, generator=other.generator)
    assert torch.equal(net.generator.get_state(), before)


def test_changes_come_by_place_as_in_the_model_itself() -> None:
    places: dict[str, list[Any]] = {"twin": [], "in place": []}

    def note(to: str) -> Any:
        return lambda value, place, kind: places[to].append((place, kind, type(value))) or value

    for net in (Odd(), Frozen(), Holder(a={"k": [1, (2, 3)]}, b=[torch.ones(1)])):
        with twin(net, note("twin")), in_place(net, note("in place")):
            pass
    assert places["twin"] == places["in place"]
    assert any(Key("k") in place.path for place, *_ in places["twin"])


def test_a_twin_is_emptied_at_the_end() -> None:
    net = Odd()
    with twin(net, same) as other:
        held = other.cache
        ref = weakref.ref(other.a)
    assert held == {}
    del other
    assert ref() is None
    assert net.a.weight is not None


# what still uses the model's own tensors -----------------------------------------------------------------------------


class Opaque:
    """What no twin looks into: an object made from something else than an object."""

    def __init__(self, model: nn.Module) -> None:
        self.error = Exception(model)

    def __deepcopy__(self, _: Any) -> Any:
        return self


class LeadingBack(nn.Module):
    """Its forward goes to the model itself, through something that is not copied."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.way = Opaque(self)

    def forward(self, x: Tensor) -> Tensor:
        me = self.way.error.args[0]
        return me.b(me.a(x).relu())


def test_a_model_that_no_twin_can_stand_in_for_is_run_itself() -> None:
    net = LeadingBack()
    before = reachable(net)
    graph = sec.trace(net, X)
    assert reachable(net) == before
    assert [(axis.name, axis.size) for axis in graph.axes] == [("a features", 8)]
    plan = sec.plan(graph, sec.Ratio(0.5))
    sec.apply(net, plan)
    assert net.a.out_features == 4
    assert net(X).shape == (4, 3)


def test_what_cannot_be_copied_is_run_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no")

    net = Frozen()
    before = reachable(net)
    monkeypatch.setattr("secateur.state.twin._Making.model", refuse)
    assert sec.trace(net, X).axes
    assert reachable(net) == before


def test_a_run_in_place_that_fails_leaves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        strayed = True

        def change(self, value: Any, _place: Any, _kind: str) -> Any:
            return torch.zeros(1) if isinstance(value, Tensor) else value + 1

        def carry_out(self, model: nn.Module) -> None:
            assert model.a.weight.shape == (1,)
            raise KeyError(type(model).__name__)

    for net in (Frozen(), Odd()):
        before = reachable(net)
        with pytest.raises(KeyError):
            run_apart(net, Fails)
        assert reachable(net) == before
        assert Walk(net).modules[""] is net
