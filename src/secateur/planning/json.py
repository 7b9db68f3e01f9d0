"""Plans as JSON: versioned, the same on every machine, refused unless every field is what it should be."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from secateur.arguments import shown
from secateur.errors import PlanError
from secateur.planning import example_recipe
from secateur.planning.masks import MaskTable, read_masks
from secateur.planning.plans import AxisPlan, Change, Kept, Plan
from secateur.planning.removal import BlockRemoval
from secateur.state.held import Key, Place
from secateur.tracing.origins import Origin

VERSION = 4  # 1 had lists of positions in the place of masks' numbers, 2 no blocks and experts that go, 3 no layers
# that become two; all are read
_MOST_TEXT = 64 * 2**20  # characters
_MOST_PARTS = 4 * 2**20  # lists and objects: what they take once parsed is many times their text
_LONGEST_PATH = 64
_LONGEST_WHY = 4096
_MOST = 2**63  # what a size, a position or a count stays below


def dumps(plan: Plan) -> str:
    """A plan as text."""
    return json.dumps(to_data(plan), separators=(",", ":"), sort_keys=True)


def to_data(plan: Plan) -> dict[str, Any]:
    masks = MaskTable()
    axes = [{**vars(axis), "keep": masks.number(axis.keep)} for axis in plan.axes]
    tensors = {
        name: {"shape": list(plan.shapes[name]), "keep": _keep_data(plan.kept[name], masks)}
        for name in sorted(plan.kept)  # as they are written, so that masks have the same numbers when written anew
    }
    held = [{**_place_data(place), "keep": _keep_data(dims, masks)} for place, dims in plan.kept_in_attributes]
    return {
        "secateur_plan": VERSION if plan.factored else 3 if plan.removed or plan.routers else 2,
        "axes": axes,
        "tensors": tensors,
        "attributes": _written_data(plan.attributes),
        "held": held,
        "masks": masks.texts,
        "macs": [plan.macs.before, plan.macs.after],
        "params": [plan.params.before, plan.params.after],
        "bytes": [plan.bytes.before, plan.bytes.after],
        "example": example_recipe.recipe(plan.example),
        "others": [how for how in map(example_recipe.recipe, plan.others) if how is not None],
        **({"why": plan.why} if plan.why else {}),
        **({"fields": dict(plan.fields)} if plan.fields else {}),
        **({"origin": origin_data(plan.origin)} if plan.origin is not None else {}),
        **({"routers": list(plan.routers)} if plan.routers else {}),
        **({"removed": _removal_data(plan.removed)} if plan.removed else {}),
        **({"factored": list(plan.factored)} if plan.factored else {}),
    }


def _written_data(attributes: Sequence[tuple[Place, Any, Any]]) -> list[dict[str, Any]]:
    return [{**_place_data(place), "was": was, "value": value} for place, was, value in attributes]


def _removal_data(removed: BlockRemoval) -> dict[str, Any]:
    return {
        "blocks": list(removed.blocks),
        "attributes": _written_data(removed.attributes),
        "lists": [{**_place_data(place), "keep": list(kept)} for place, kept in removed.lists],
    }


def origin_data(origin: Origin) -> dict[str, Any]:
    return {"library": origin.library, "name": origin.name, "arguments": origin.arguments}


def origin_from(item: Any) -> Origin:
    """How a model is built, in parsed JSON; what that means is decided where it is asked for."""
    item = _mapping(item, "origin")
    if "arguments" not in item:
        raise PlanError("this is not a plan: its origin has no arguments")
    given = None if item["arguments"] is None else _typed(item, "arguments", str)
    return Origin(_typed(item, "library", str), _typed(item, "name", str), given)


def _keep_data(dims: Kept, masks: MaskTable) -> dict[str, int | list[int]]:
    return {str(dim): masks.number(index) for dim, index in sorted(dims.items())}


def _place_data(place: Place) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for step in place.path:
        if not isinstance(step, Key):
            steps.append({"index": step} if isinstance(step, int) else {"name": step})
        elif type(step.key) in (str, int):
            steps.append({"key": step.key})
        else:
            raise PlanError(
                f"{place} is under a key of type {type(step.key).__name__}, which JSON does not have; "
                "use text or whole numbers as keys there"
            )
    return {"module": place.owner, "path": steps}


def loads(text: str | bytes) -> Plan:
    """The plan in a text; refused with the reason where it is not one."""
    if not isinstance(text, str | bytes):
        raise PlanError(f"a plan is read from text, not {type(text).__name__}")
    try:
        return from_data(parse(text))
    except ValueError as error:
        raise PlanError(f"this is not a plan: {error}") from None


def parse(text: str | bytes) -> Any:
    """JSON of unknown origin, as data; ValueError where it is too large, too deep or not JSON."""
    if len(text) > _MOST_TEXT:
        raise ValueError(f"{len(text)} characters are more than any plan has")
    text = text.decode() if isinstance(text, bytes) else text
    if text.count("[") + text.count("{") > _MOST_PARTS:
        raise ValueError("it has more lists and objects than any plan")
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("the same key twice in one object")
    return made


def from_data(data: Any) -> Plan:
    """The plan in parsed JSON."""
    try:
        version = _typed(_mapping(data, "plan"), "secateur_plan", int)
        if not 1 <= version <= VERSION:
            raise PlanError(f"a plan of version {version}; this library reads versions 1 to {VERSION}")
        masks = read_masks(data.get("masks", []))
        tensors = _mapping(data.get("tensors"), "tensors")
        return Plan(
            axes=tuple(_axis(item, masks) for item in _list(data.get("axes"), "axes")),
            kept={name: _kept(_mapping(t, shown(name)).get("keep"), name, masks) for name, t in tensors.items()},
            shapes={name: _ints(t.get("shape"), f"shape of {shown(name)}") for name, t in tensors.items()},
            attributes=_written(data.get("attributes")),
            kept_in_attributes=tuple(
                (place, _kept(item.get("keep"), str(place), masks))
                for place, item in _places(data.get("held"), "held").items()
            ),
            macs=_change(data.get("macs"), "macs"),
            params=_change(data.get("params"), "params"),
            bytes=_change(data.get("bytes"), "bytes"),
            example=_example(data.get("example")),
            others=tuple(map(_example, _list(data.get("others", []), "others"))),
            why=_typed(data, "why", str)[:_LONGEST_WHY] if "why" in data else "",
            fields=_fields(data.get("fields", {})),
            origin=origin_from(data["origin"]) if "origin" in data else None,
            routers=_names(data.get("routers", []), "routers"),
            removed=_removal(data["removed"]) if "removed" in data else BlockRemoval(),
            factored=_names(data.get("factored", []), "factored"),
        )
    except RecursionError:
        raise PlanError("this is not a plan: it is nested too deeply") from None


def _written(items: Any) -> tuple[tuple[Place, Any, Any], ...]:
    return tuple((place, *_numbers(item)) for place, item in _places(items, "attributes").items())


def _names(items: Any, what: str) -> tuple[str, ...]:
    names = _list(items, what)
    if not all(type(name) is str and 0 < len(name) <= _LONGEST_WHY for name in names) or len(set(names)) < len(names):
        raise PlanError(f"this is not a plan: {what} should be names, each once")
    return tuple(names)


def _removal(item: Any) -> BlockRemoval:
    item = _mapping(item, "removed")
    blocks = _names(item.get("blocks"), "blocks")
    lists = _places(item.get("lists"), "lists").items()
    kept = tuple((place, _positions(entry.get("keep"), str(place), ())) for place, entry in lists)
    return BlockRemoval(blocks, _written(item.get("attributes")), kept)


def _example(how: Any) -> Any:
    if how is None:
        return None
    try:
        return example_recipe.made(how)
    except (ValueError, RuntimeError) as error:
        raise PlanError(f"this is not a plan: {error}") from None


def _axis(item: Any, masks: Sequence[tuple[int, ...]]) -> AxisPlan:
    item = _mapping(item, "axis")
    name, size = _typed(item, "name", str), _typed(item, "size", int)
    keep = _positions(item.get("keep"), f"axis {shown(name)}", masks)
    if keep[-1] >= size:
        raise PlanError(f"a plan keeps position {keep[-1]} of axis {shown(name)}, which has {size}")
    costs = _typed(item, "macs", int), _typed(item, "params", int)
    return AxisPlan(name, size, keep, _typed(item, "exact", bool), *costs)


def _places(items: Any, what: str) -> dict[Place, Mapping[str, Any]]:
    listed = [(_place(item), item) for item in _list(items, what)]
    if len(dict(listed)) < len(listed):
        raise PlanError(f"this is not a plan: {what} names one place twice")
    return dict(listed)


def _place(item: Any) -> Place:
    item = _mapping(item, "attribute")
    steps = tuple(_step(step) for step in _list(item.get("path"), "path"))
    if not 0 < len(steps) <= _LONGEST_PATH:
        raise PlanError(f"a plan sets what {len(steps)} steps lead to; it must be 1 to {_LONGEST_PATH}")
    return Place(_typed(item, "module", str), steps)


def _step(step: Any) -> Any:
    if len(_mapping(step, "path step")) == 1:
        ((kind, value),) = step.items()
        if kind == "name" and type(value) is str and value and not value.startswith("__"):
            return value
        if kind == "index" and type(value) is int and 0 <= value < _MOST:
            return value
        if kind == "key" and (type(value) is str or (type(value) is int and abs(value) < _MOST)):
            return Key(value)
    raise PlanError(f"a plan cannot set what the step {shown(step)} leads to")


def _kept(item: Any, name: str, masks: Sequence[tuple[int, ...]]) -> Kept:
    name = shown(name)
    kept = {}
    for dim, index in _mapping(item, f"keep of {name}").items():
        if not (dim.isascii() and dim.isdigit()) or len(dim) > 2 or str(int(dim)) != dim:
            raise PlanError(f"a plan cuts dimension {shown(dim)} of {name}")
        kept[int(dim)] = _positions(index, f"{name} dim {dim}", masks)
    return kept


def _positions(item: Any, what: str, masks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What stays: the number of a mask, or a list."""
    if type(item) is int:
        if not 0 <= item < len(masks):
            raise PlanError(f"a plan keeps of {what} what mask {shown(item)} says, but has {len(masks)} masks")
        return masks[item]
    positions = _ints(item, f"keep of {what}")
    if not positions or any(b <= a for a, b in pairwise(positions)):
        raise PlanError(f"a plan's positions for {what} must be a rising, non-empty list")
    return positions


def _mapping(item: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise PlanError(f"this is not a plan: {what} should be an object, not {type(item).__name__}")
    return item


def _list(item: Any, what: str) -> list[Any]:
    if not isinstance(item, list):
        raise PlanError(f"this is not a plan: {what} should be a list, not {type(item).__name__}")
    return item


def _ints(item: Any, what: str) -> tuple[int, ...]:
    listed = _list(item, what)
    if any(type(n) is not int or not 0 <= n < _MOST for n in listed):
        raise PlanError(f"this is not a plan: {what} should hold whole numbers from 0 on, below 2**63")
    return tuple(listed)


def _typed(item: Mapping[str, Any], key: str, kind: type) -> Any:
    value = item.get(key)
    if type(value) is not kind:
        raise PlanError(f"this is not a plan: {key} should be {kind.__name__}, not {type(value).__name__}")
    if isinstance(value, int) and abs(value) >= _MOST:
        raise PlanError(f"this is not a plan: {key} is beyond 2**63")
    return value


def _numbers(item: Mapping[str, Any]) -> tuple[Any, Any]:
    """What an attribute was and will be: two whole numbers, or two floats where a model holds a float."""
    kind = float if type(item.get("was")) is float else int
    numbers = _typed(item, "was", kind), _typed(item, "value", kind)
    if not all(map(math.isfinite, numbers)):
        raise PlanError(f"this is not a plan: {shown(numbers)} are not finite numbers")
    return numbers


def _fields(item: Any) -> dict[str, Any]:
    fields = _mapping(item, "fields")
    for name, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            if type(each) not in (int, float, str, bool, type(None), list):
                raise PlanError(f"this is not a plan: the field {shown(name)} is {shown(each)}")
    return dict(fields.items())


def _change(item: Any, what: str) -> Change:
    pair = _ints(item, what)
    if len(pair) != 2:
        raise PlanError(f"this is not a plan: {what} should be two numbers")
    return Change(*pair)
