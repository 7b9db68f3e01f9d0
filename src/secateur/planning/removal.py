"""Whole blocks that go, and what else follows: numbers that count them, lists with an entry for each.

Blocks are entries of `nn.ModuleList` and `nn.Sequential`. Where these are numbered, what comes after a block that goes
moves up: without `layers.1`, what was `layers.2` is `layers.1`. A removal is written in the names before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from secateur.state.held import Place

if TYPE_CHECKING:
    from secateur.planning.plans import Plan


@dataclass(frozen=True)
class BlockRemoval:
    """The blocks that go, by name, with numbers (where, before and after) and lists (which entries stay) that follow.

    >>> gone = BlockRemoval(("layers.1", "layers.3"))
    >>> gone.after("layers.2.weight"), gone.after("layers.3.weight"), gone.before("layers.2.weight")
    ('layers.1.weight', None, 'layers.4.weight')
    """

    blocks: tuple[str, ...] = ()
    attributes: tuple[tuple[Place, Any, Any], ...] = ()
    lists: tuple[tuple[Place, tuple[int, ...]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def after(self, name: str) -> str | None:
        """What a module or a tensor is called without the blocks; None for what is part of one."""
        if any(name == block or name.startswith(f"{block}.") for block in self.blocks):
            return None
        return self._renamed(name, lambda index, gone: index - sum(other < index for other in gone), new=False)

    def before(self, name: str) -> str:
        """What that was called before which is called so without the blocks."""
        return self._renamed(name, _earlier, new=True)

    def then(self, second: BlockRemoval) -> BlockRemoval:
        """This removal and, on the model that it leaves, a second one, as a single one."""
        numbers = {place: (was, now) for place, was, now in self.attributes}
        for place, was, now in second.attributes:
            place = _moved(place, self.before)
            numbers[place] = (numbers.get(place, (was, was))[0], now)
        lists = dict(self.lists)
        for place, kept in second.lists:
            place = _moved(place, self.before)
            lists[place] = tuple(lists[place][i] for i in kept) if place in lists else kept
        blocks = (*self.blocks, *map(self.before, second.blocks))
        return BlockRemoval(blocks, tuple((place, *pair) for place, pair in numbers.items()), tuple(lists.items()))

    def _renamed(self, name: str, number: Callable[[int, list[int]], int], *, new: bool) -> str:
        """A name with another number for each list that loses blocks; `new`: it is one without these."""
        old: list[str] = []
        found: list[str] = []
        for part in name.split("."):
            gone = self._gone(".".join(old)) if part.isdecimal() else []
            found.append(str(number(int(part), gone)) if gone else part)
            old.append(found[-1] if new else part)
        return ".".join(found)

    def _gone(self, parent: str) -> list[int]:
        """The numbers of the blocks that a list loses, rising."""
        pairs = (block.rpartition(".") for block in self.blocks)
        return sorted(int(last) for home, _, last in pairs if home == parent and last.isdecimal())


def _earlier(index: int, gone: Iterable[int]) -> int:
    for other in gone:
        index += other <= index
    return index


def _moved(place: Place, name: Callable[[str], str]) -> Place:
    """A place whose module has another name."""
    return Place(name(place.owner), place.path)


def without(plan: Plan, removed: BlockRemoval) -> Plan:
    """What a plan does where some blocks are not there, in the names that are left then."""

    def places(entries: Any) -> Any:
        stay = [(at, *rest) for at, *rest in entries if removed.after(at.owner) is not None]
        return tuple((_moved(at, lambda name: removed.after(name) or name), *rest) for at, *rest in stay)

    def names(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for old, value in entries.items() if (name := removed.after(old)) is not None}

    split = [(axis, *axis.name.partition(" ")) for axis in plan.axes]
    axes = ((axis, removed.after(of), kind) for axis, of, _, kind in split)
    return replace(
        plan,
        axes=tuple(replace(axis, name=f"{of} {kind}") for axis, of, kind in axes if of is not None),
        kept=names(plan.kept),
        shapes=names(plan.shapes),
        attributes=places(plan.attributes),
        kept_in_attributes=places(plan.kept_in_attributes),
        routers=tuple(names(dict.fromkeys(plan.routers))),
        factored=tuple(names(dict.fromkeys(plan.factored))),
    )


__all__ = ["BlockRemoval", "without"]
