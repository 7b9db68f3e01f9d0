"""What follows when blocks go: numbers that count them or say which one each is, and lists with an entry for each.

Where it is known how a model is built, its constructor tells: of its fields that are the number of blocks, one makes
what is left when it is smaller, tensor by tensor; lists beside it then have the entries of what is left. All numbers
and lists that the constructor makes others then are those that follow: `config.num_hidden_layers`,
`config.layer_types`, the `layer_idx` of each attention. For any other model, numbers follow that rise by one from block
to block under the name of an index, and those beside the list under the name of a count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from secateur.planning.removal import BlockRemoval
from secateur.planning.told import Written
from secateur.state.held import Key, Place, holder, is_number, items, named_tensors, put
from secateur.tracing.constructor import Maker, held_in, numbers_in

_INDEX = re.compile(r"(layer|block|stage)?_?(idx|index|id|number|num|no|i)")
_COUNT = re.compile(r"((num|n|number)_?(of_)?)?((hidden|encoder|decoder)_)?(layers?|blocks?)|depth")


def followed(model: nn.Module, blocks: tuple[str, ...], maker: Maker | None) -> tuple[BlockRemoval, Maker | None]:
    """The removal of some blocks with all that follows; and the call that builds what is left, if one was found."""
    removed = BlockRemoval(blocks)
    fewer = None if maker is None else _fewer(maker, model, removed)
    if maker is None or fewer is None:
        modules = dict(model.named_modules())
        told = [*_indices(modules, removed), *_counts(modules, removed)]
        return replace(removed, attributes=tuple(told)), None
    base, built = maker.build({}), fewer.build({})
    lists = dict(_lists(model, base, built, removed))
    told = [
        written
        for written in changed_numbers(model, base, built, removed)
        if not any(written[0].path[: len(at.path)] == at.path for at in lists if at.owner == written[0].owner)
    ]
    return replace(removed, attributes=tuple(told), lists=tuple(lists.items())), fewer


def _entries(model: nn.Module, removed: BlockRemoval) -> Iterator[tuple[str, int, list[int]]]:
    """Each list that loses blocks: its name, how long it is, and the numbers of the entries that stay."""
    modules = dict(model.named_modules())
    for home in dict.fromkeys(block.rpartition(".")[0] for block in removed.blocks):
        keys = list(modules[home]._modules)
        names = [f"{home}.{key}".lstrip(".") for key in keys]
        yield home, len(keys), [i for i, name in enumerate(names) if name not in removed.blocks]


# by the constructor -------------------------------------------------------------------------------------------------


def _fewer(maker: Maker, model: nn.Module, removed: BlockRemoval) -> Maker | None:
    """The call that builds what is left of a model; None if there is none with other fields."""
    if not _builds(maker, model, BlockRemoval()):
        return None
    done: tuple[str, ...] = ()
    for home, size, stay in _entries(model, removed):
        done += tuple(block for block in removed.blocks if block.rpartition(".")[0] == home)
        fields = [place for place, value in maker.fields().items() if is_number(value) and value == size]
        tried = (_changed(maker, place, size, stay, lists=lists) for place in fields for lists in (True, False))
        found = next((each for each in tried if _builds(each, model, BlockRemoval(done))), None)
        if found is None:
            return None
        maker = found
    return maker


def _builds(maker: Maker, model: nn.Module, removed: BlockRemoval) -> bool:
    """Whether a call builds what is left of a model, by the names and shapes of its tensors."""
    try:
        made = maker.build({})
    except Exception:  # any code of the user's may run here
        return False
    left = {removed.after(name): tensor.shape for name, tensor in named_tensors(model)}
    left.pop(None, None)
    return left == {name: tensor.shape for name, tensor in named_tensors(made)}


def _changed(maker: Maker, place: Place, size: int, stay: list[int], *, lists: bool) -> Maker:
    """A call with another number of blocks; `lists`: and only their entries in lists beside that number."""
    arguments = maker.changed(lambda at, value: len(stay) if at == place else value)
    beside: Any = arguments
    for step in place.path[:-1]:
        key = step.key if isinstance(step, Key) else step
        beside = getattr(beside, key) if key is step and isinstance(step, str) else beside[key]
    store = holder(beside)
    if lists and store is not None and not isinstance(beside, list):
        for step, each in list(items(store, beside)):
            if type(each) in (list, tuple) and len(each) == size:
                put(store, step, type(each)([each[i] for i in stay]))
    return Maker(maker.function, arguments)


def changed_numbers(model: nn.Module, base: nn.Module, built: nn.Module, removed: BlockRemoval) -> Iterator[Written]:
    """Whole numbers of a model that its constructor makes others in what is left."""
    before, mine = numbers_in(base), numbers_in(model)
    for place, now in numbers_in(built).items():
        old = Place(removed.before(place.owner), place.path)
        was = before.get(old)
        if is_number(now) and is_number(was) and was != now and mine.get(old) == was:
            yield old, was, now


def _lists(model: nn.Module, base: nn.Module, built: nn.Module, removed: BlockRemoval) -> Iterator[tuple[Place, Any]]:
    """Lists that the constructor makes shorter by the entries of blocks that go."""
    before, after, mine = _lists_in(base), _lists_in(built), _lists_in(model)
    for place, now in after.items():
        old = Place(removed.before(place.owner), place.path)
        was = before.get(old, ())
        for _, size, stay in _entries(model, removed):
            same = len(was) == size != len(now) and mine.get(old) == was
            if same and list(now) == [was[i] for i in stay]:
                yield old, tuple(stay)
                break


def _lists_in(model: nn.Module) -> dict[Place, Any]:
    """Plain lists and tuples that a model's modules hold, also in plain objects."""
    inside = Tensor | nn.Module
    return held_in(model, lambda value: type(value) in (list, tuple) and not any(isinstance(e, inside) for e in value))


# by their names -----------------------------------------------------------------------------------------------------


def _indices(modules: Mapping[str, nn.Module], removed: BlockRemoval) -> Iterator[Written]:
    """Numbers by which each block of a list knows which one it is."""
    for home, size, stay in _entries(modules[""], removed):
        blocks = [(f"{home}.{key}".lstrip("."), block) for key, block in modules[home]._modules.items()]
        held = [numbers_in(block) if block is not None else {} for _, block in blocks]
        for place, first in held[0].items():
            rising = all(is_number(each.get(place)) and each[place] == first + i for i, each in enumerate(held))
            if rising and size > 1 and _INDEX.fullmatch(_last_name(place)):
                for new, i in enumerate(stay):
                    if new != i:
                        owner = f"{blocks[i][0]}.{place.owner}".rstrip(".")
                        yield Place(owner, place.path), first + i, first + new


def _counts(modules: Mapping[str, nn.Module], removed: BlockRemoval) -> Iterator[Written]:
    """Numbers beside a list that say how many blocks it has."""
    for home, size, stay in _entries(modules[""], removed):
        owner = home.rpartition(".")[0]
        for name, value in modules[owner].__dict__.items() if home else ():
            if is_number(value) and value == size and _COUNT.fullmatch(name.strip("_").lower()):
                yield Place(owner, (name,)), size, len(stay)


def _last_name(place: Place) -> str:
    return next((step.strip("_").lower() for step in reversed(place.path) if isinstance(step, str)), "")


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """The arguments of a call that are others, by name, with their new values.

    >>> changed_fields({"depth": 6, "text": {"layers": 4}}, {"depth": 5, "text": {"layers": 3}})
    {'depth': 5, 'text.layers': 3}
    """
    found: dict[str, Any] = {}
    for name, now in after.items():
        was = before.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            found |= changed_fields(was, now, f"{within}{name}.")
        elif was != now:
            found[f"{within}{name}"] = list(now) if isinstance(now, tuple) else now
    return found


__all__ = ["changed_fields", "changed_numbers", "followed"]
