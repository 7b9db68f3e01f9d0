"""Names for axes that a person understands: `layer1.0.conv1 channels`, `blocks.3.attn heads`, `layers.5.mlp hidden`."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from secateur.axes import Atom, Layout, Product, atoms, free_atoms, hint, resolve
from secateur.sizes.size import Dim, Expr
from secateur.state.held import Place
from secateur.tracing.tracer import Use

ROTARY = "rotary pairs"  # dims of queries and keys that are rotated two by two: RoPE, arxiv.org/abs/2104.09864
GROUPS = "groups"
HEADS = ("heads", "kv heads", "query heads per kv head")
_DIMS = ("head dims", "value head dims")
_OF_PARENT = (*HEADS, *_DIMS, ROTARY, "experts")  # of the module that the layers are in
_LAYER = re.compile(r"_l(\d+)(_reverse)?$")  # how nn.LSTM, nn.GRU and nn.RNN end the names of their weights


def called(atom: Atom) -> str:
    """What people call an axis of its kind; empty if there is no word for it."""
    return next((names[0] for names in atom.hints), "")


def hint_attention(definitions: Mapping[Place, Expr], uses: Iterable[Use]) -> None:
    """What is known of attention only at the end: rotary pairs, and sizes held under names like `num_heads`."""
    for use in uses:
        for layout in _of_queries_and_keys(use):
            often = Counter(atoms(layout))
            paired = [atom for atom in free_atoms(layout) if often[atom] > 1 or _doubled(resolve(layout), atom)]
            for atom in paired:
                atom.hints = {(ROTARY,): None, **atom.hints}
            for atom in free_atoms(layout) if paired else ():
                hint(atom, _DIMS[0])
    for place, expr in definitions.items():
        held = str(place.path[-1])
        if isinstance(expr, Dim) and "head" in held:
            hint(expr.layout, "head dims" if "dim" in held or "size" in held else "heads")


def _of_queries_and_keys(use: Use) -> Iterator[Layout]:
    """What data and other data are summed over in a product."""
    of_data = [layout for layout, names in use.summed if names is None]
    given = (dims for dims, names in use.given if names is None and of_data)
    data = [{atom for dim in dims for atom in free_atoms(dim)} for dims in given]
    yield from (one for one in of_data if sum(there.issuperset(free_atoms(one)) for there in data) > 1)


def _doubled(layout: Layout, atom: Atom) -> bool:
    """Whether an atom is in a product with two fixed positions, as where neighbours are rotated: (pairs × 2)."""
    if isinstance(layout, Atom):
        return False
    fixed = [part for part in layout.parts if isinstance(part, Atom) and part.fixed is not None]
    if isinstance(layout, Product) and atom in layout.parts and [part.size for part in fixed] == [2]:
        return True
    return any(_doubled(part, atom) for part in layout.parts)


def name_axes(
    sites: Mapping[Atom, Sequence[tuple[str, int]]], layouts: Mapping[str, tuple[Layout, ...]]
) -> dict[Atom, str]:
    """A unique name per axis, from the first tensor that makes it and from what the ops called it."""
    names: dict[Atom, str] = {}
    taken: dict[str, int] = {}
    for atom, found in sites.items():
        name = _name(atom, found, layouts)
        if name.endswith(_DIMS[1]) and (plain := f"{name.removesuffix(_DIMS[1])}{_DIMS[0]}") not in taken:
            name = plain  # no others to tell them from
        taken[name] = taken.get(name, 0) + 1
        names[atom] = name if taken[name] == 1 else f"{name} #{taken[name]}"
    return names


def _name(atom: Atom, sites: Sequence[tuple[str, int]], layouts: Mapping[str, tuple[Layout, ...]]) -> str:
    made = [tensor for tensor, dim in sites if dim == 0 and len(layouts[tensor]) > 1] or [sites[0][0]]
    used = [tensor for tensor, dim in sites if dim == 1 and len(layouts[tensor]) > 1]
    maker = _module(made[0])
    kind = called(atom)
    parent = maker.rpartition(".")[0]
    if kind in _OF_PARENT:
        return f"{parent or maker} {kind}"
    if kind == "units":
        return f"{maker} {_layer(made[0], layouts)}units"
    if kind:
        return f"{maker} {kind}"
    if any(called(other) == GROUPS for other in free_atoms(layouts[made[0]][0])):
        return f"{maker} channels per group"
    if len(layouts[made[0]]) > 2:
        return f"{maker} channels"
    siblings = {_module(tensor).rpartition(".")[0] for tensor in (*made, *used)}
    if parent and len(siblings) == 1 and used and len(layouts[made[0]]) == 2:
        return f"{parent} hidden"
    return f"{maker} features"


def _layer(tensor: str, layouts: Mapping[str, tuple[Layout, ...]]) -> str:
    """Which of several layers and directions a recurrent module's weight belongs to; empty if there is one."""
    found = _LAYER.search(tensor)
    start = tensor.removesuffix(found[0]) if found else tensor
    several = sum(name.startswith(f"{start}_l") for name in layouts) > 1
    return f"layer {found[1]}{' reverse' if found[2] else ''} " if found and several else ""


def _module(tensor: str) -> str:
    """The module that holds a tensor; the tensor's own name where that is the model itself."""
    own = tensor.replace(".parametrizations", "")
    return own.rpartition(".")[0].removesuffix(".weight") or own
