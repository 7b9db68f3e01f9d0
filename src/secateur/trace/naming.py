"""Names for axes that a person understands: `layer1.0.conv1 channels`, `blocks.3.attn heads`, `layers.5.mlp hidden`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from secateur.axes import Atom, Layout, hint
from secateur.trace.sizes import Dim, Expr, Place


def hint_heads(definitions: Mapping[Place, Expr]) -> None:
    """An axis whose size is held under a name like `num_heads` or `head_dim` is called that."""
    for place, expr in definitions.items():
        held = str(place.path[-1])
        if isinstance(expr, Dim) and "head" in held:
            hint(expr.layout, "head dims" if "dim" in held or "size" in held else "heads")


def name_axes(
    sites: Mapping[Atom, Sequence[tuple[str, int]]], layouts: Mapping[str, tuple[Layout, ...]]
) -> dict[Atom, str]:
    """A unique name per axis, from the first tensor that makes it and from what the ops called it."""
    names: dict[Atom, str] = {}
    taken: dict[str, int] = {}
    for atom, found in sites.items():
        name = _name(atom, found, layouts)
        taken[name] = taken.get(name, 0) + 1
        names[atom] = name if taken[name] == 1 else f"{name} #{taken[name]}"
    return names


def _name(atom: Atom, sites: Sequence[tuple[str, int]], layouts: Mapping[str, tuple[Layout, ...]]) -> str:
    made = [tensor for tensor, dim in sites if dim == 0 and len(layouts[tensor]) > 1] or [sites[0][0]]
    used = [tensor for tensor, dim in sites if dim == 1 and len(layouts[tensor]) > 1]
    maker = _module(made[0])
    hint = next(iter(atom.hints), "")
    parent = maker.rpartition(".")[0]
    if hint in ("heads", "head dims", "groups", "experts"):
        return f"{parent if hint != 'groups' and parent else maker} {hint}"
    if hint:
        return f"{maker} {hint}"
    if len(layouts[made[0]]) > 2:
        return f"{maker} channels".strip()
    siblings = {_module(tensor).rpartition(".")[0] for tensor in (*made, *used)}
    if parent and len(siblings) == 1 and used and len(layouts[made[0]]) == 2:
        return f"{parent} hidden"
    return f"{maker} features".strip()


def _module(tensor: str) -> str:
    return tensor.replace(".parametrizations", "").rpartition(".")[0].removesuffix(".weight")
