"""Parameters that no run reached: other inputs may, so what could feed them keeps its size, or they are cut along.

A layer that did not run is fed by something that flows where it lives: into or out of the module that holds it, or of
those beside it. All that flows there and has the size that it takes is cut along with it, as one; where what it puts
out fits, too, all that fit stay whole. One that is like another beside it goes with that, but need not come at its
place: then all that it could be fed by, or be added to, are cut along as one.
"""

from collections.abc import Iterator, Mapping
from typing import TypeGuard

from torch import nn

from secateur.axes import Layout, constant, fix, free_atoms, resolve, unify
from secateur.compat import Convolution, TransposedConvolution
from secateur.ops.value import Value
from secateur.sizes.size import places
from secateur.tracing.capture import Capture
from secateur.tracing.stated import functions_of, is_users

_REASON = "not used when the model ran on the example"
_REMEDY = "give an example that does (secateur.Examples)"


def idle_modules(model: nn.Module, capture: Capture) -> list[str]:
    """The outermost modules with parameters none of which any run has used."""
    used = {id(p) for name, p in model.named_parameters() if capture.values[name].used}
    inside: dict[nn.Module, set[bool]] = {}  # whether parameters are used, those of modules inside included

    def look(module: nn.Module) -> set[bool]:
        if module not in inside:
            inside[module] = {id(p) in used for p in module._parameters.values() if p is not None}
            inside[module].update(*(look(child) for child in module._modules.values() if child is not None))
        return inside[module]

    found: list[str] = []
    for name, module in model.named_modules():
        if look(module) == {False} and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def alike_beside(model: nn.Module, name: str) -> list[str]:
    """The modules beside one that are of the same class, with parameters of the same names and shapes."""
    home, _, own = name.rpartition(".")
    own_form = form(model.get_submodule(name))
    beside = model.get_submodule(home).named_children() if name else ()
    return [f"{home}.{key}" if home else key for key, other in beside if key != own and form(other) == own_form]


def form(module: nn.Module) -> object:
    """What two modules have in common that are built alike."""
    return type(module), {name: tensor.shape for name, tensor in module.named_parameters()}


def protect(model: nn.Module, capture: Capture) -> None:
    """Settle the dimensions of every parameter that no run has used, and of what may feed it."""
    modules = dict(model.named_modules())
    for name in sorted(capture.placed):
        _whichever(capture.flows[name], _flowing(name.rpartition(".")[0], modules, capture))
    idle = idle_modules(model, capture)
    unused = {n: v for n, v in capture.values.items() if not v.used and capture.kinds[n] == "parameter"}
    for name in idle:
        inside = {n: v for n, v in unused.items() if n.startswith(f"{name}." if name else "")}
        like = next((other for other in alike_beside(model, name) if other not in idle), None)
        flowing = _flowing(name.rpartition(".")[0], modules, capture)
        if like is not None and _settled_like(name, like, inside, capture):
            _whichever(capture.flows[like], flowing)
            continue
        _settle(name, inside, flowing, modules[name])
    for name, value in unused.items():
        if not any(name.startswith(f"{outer}.") for outer in idle):
            _settle(name, {name: value}, _flowing(name.rpartition(".")[0], modules, capture), None)
    for name, value in capture.values.items():
        if not value.used:
            for dim in value.dims:
                fix(dim, _REASON)
            for dim, layout in _met_later(name, modules, capture):
                fix(layout, f"code that no run reached reads {name}, which has {dim.size}, too; {_REMEDY}")


def _met_later(name: str, modules: Mapping[str, nn.Module], capture: Capture) -> list[tuple[Layout, Layout]]:
    """The dimensions of a buffer that no run read, but some other method does, with what flows there of that size."""
    owner, _, own = name.rpartition(".")
    if capture.kinds[name] != "buffer" or not is_users(type(modules[owner])):
        return []
    read = any(own in f.__code__.co_names for f in functions_of(type(modules[owner])) if f.__name__ != "__init__")
    dims = [dim for dim in capture.values[name].dims if dim.size > 1]
    return _matches(dims, _flowing(owner, modules, capture)) if read else []


def _settled_like(name: str, like: str, values: Mapping[str, Value], capture: Capture) -> bool:
    """Tie a module to others as one of its kind is; what that one has for itself, this one keeps whole.

    Not where the other computes with sizes that it holds: these would have to be rewritten here too.
    """
    own = f"{like}."
    exprs = [side for c in capture.tracer.sizes.comparisons for side in (c.left, c.right)]
    exprs += [equation.expr for equation in capture.tracer.sizes.equations]
    if any(place.owner == like or place.owner.startswith(own) for expr in exprs for place in places(expr)):
        return False
    others = (v for n, v in capture.values.items() if not n.startswith(own) and n not in values)
    outside = {atom for value in others for dim in value.dims for atom in free_atoms(dim)}
    pairs = [
        (dim, theirs)
        for key, value in values.items()
        for dim, theirs in zip(value.dims, capture.values[own + key.removeprefix(f"{name}.")].dims, strict=True)
        if not outside.isdisjoint(free_atoms(theirs))
    ]
    _keep_whole(values, [dim for dim, _ in pairs])
    for dim, theirs in pairs:
        unify(dim, theirs)
    return True


def _keep_whole(values: Mapping[str, Value], but: list[Layout]) -> None:
    """Settle every dimension of some tensors but for a few."""
    for value in values.values():
        value.used = True
        for dim in value.dims:
            if not any(dim is other for other in but):
                fix(dim, _REASON)


def _flowing(owner: str, modules: Mapping[str, nn.Module], capture: Capture) -> list[Layout]:
    """The layouts that flow through the module that holds something, or the nearest around it that ran."""
    while owner and not capture.flows.get(owner):
        owner = owner.rpartition(".")[0]
    flows = [*capture.flows.get(owner, ()), *_through_parts(owner, modules, capture)]
    return [layout for layout in map(resolve, flows) if not constant(layout)]


def _through_parts(owner: str, modules: Mapping[str, nn.Module], capture: Capture) -> Iterator[Layout]:
    """What flows through the parts of a module; of one that only holds others and does not run, through those."""
    for key, _ in modules[owner].named_children():
        part = f"{owner}.{key}" if owner else key
        yield from capture.flows.get(part) or _through_parts(part, modules, capture)


def _whichever(layouts: list[Layout], flowing: list[Layout]) -> None:
    """Make one of what goes through a module and all else of the same size that flows around it."""
    for layout in map(resolve, layouts):
        for other in flowing:
            if not constant(resolve(layout)) and other.size == layout.size:
                unify(layout, other)


def _settle(name: str, values: Mapping[str, Value], flowing: list[Layout], module: nn.Module | None) -> None:
    takes, gives = _interface(values, module)
    fed, fits = _matches(takes, flowing), _matches(gives, flowing)
    if module is None and len(fits) == 1:  # a table, of which one dimension goes with what flows
        fed, fits = fits, fed
    if fed and not fits:  # whichever feeds it, all that could are cut along as one
        _keep_whole(values, [dim for dim, _ in fed])
        for dim, layout in fed:
            unify(dim, layout)
        return
    for _, layout in (*fed, *fits):
        fix(layout, f"may feed {name}, which no run reached; {_REMEDY}")


def _interface(values: Mapping[str, Value], module: nn.Module | None) -> tuple[list[Layout], list[Layout]]:
    """The dimensions along which something that did not run may be fed, and those of what it may put out."""
    dims = [dim for value in values.values() for dim in value.dims if dim.size > 1]
    layers = [layer for layer in module if any(True for _ in layer.parameters())] if _in_a_row(module) else [module]
    if _plain(layers[0]) and _plain(layers[-1]):
        weights = [value for name, value in values.items() if name.endswith("weight")]
        return [weights[0].dims[1]], [weights[-1].dims[0]]
    if all(sum(dim.size > 1 for dim in value.dims) == 1 for value in values.values()):
        return dims, []  # vectors: what comes out is what went in
    return [], dims


def _in_a_row(module: nn.Module | None) -> TypeGuard[nn.Sequential]:
    return type(module) is nn.Sequential


def _plain(layer: nn.Module | None) -> bool:
    """Whether a layer's weight has what it puts out first, and what it takes second."""
    known = isinstance(layer, nn.Linear | Convolution) and not isinstance(layer, TransposedConvolution)
    return known and getattr(layer, "groups", 1) == 1


def _matches(dims: list[Layout], flowing: list[Layout]) -> list[tuple[Layout, Layout]]:
    distinct = {id(layout): layout for layout in flowing}
    return [(dim, layout) for dim in dims for layout in distinct.values() if layout.size == dim.size]


__all__ = ["alike_beside", "form", "idle_modules", "protect"]
