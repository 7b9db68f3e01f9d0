"""Sizes that a module's constructor stored, and what its other code does with them.

    self.width = width
    self.up = nn.Linear(4, width)

says that the attribute is the size of something that `up` makes, and nobody has to run it: it is read off the source.
A run follows such an attribute where the model's code reads it. Where no run read it, code that no run reached may: a
method of its own (`sample(n)`, `init_hidden(batch)`), a branch that another argument takes. If that only hands the
size on, it is enough that the attribute follows the cut. If it computes with it, as in `h[:, : self.width // 2]`, the
positions on either side matter, and no run showed which are which: then what has this size stays whole.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from secateur.axes import Layout
from secateur.state.held import ATOMS, Place, Walk, is_number

_AT_FIRST = frozenset(  # what sets up weights, or only speaks of them
    ("__init__", "__repr__", "extra_repr", "reset_parameters", "_reset_parameters", "init_weights", "_init_weights")
)
_ADDS = frozenset(("append", "extend", "insert", "update"))
_DESCRIBED = frozenset(("transformers", "diffusers", "timm", "torchvision"))
_MOST_READ = 1024  # functions whose source, once read, is remembered
_MOST_ASKED = 8 * _MOST_READ  # answers of theirs
_OF_SIZES = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)  # a power or a quotient is no size


@dataclass(frozen=True)
class Stated:
    """An attribute that no run read, and the tensors whose size it is by what the constructor says.

    `computed` is where other code computes with it, as file and line; empty if none does. What a class holds for all
    its models is `shared`, and cannot follow.
    """

    place: Place
    value: int
    tensors: tuple[str, ...]
    computed: str
    shared: bool = False


def stated_sizes(model: nn.Module, dims: Mapping[str, Sequence[Layout]], known: Collection[Place]) -> Iterator[Stated]:
    """Those of all modules whose code is not torch's own; `known` are the places that a run has read."""
    codes: dict[type[nn.Module], _Code] = {}
    modules, below = dict(model.named_modules()), tensors_below(dims)
    sizes = {name: {dim.size for dim in each} for name, each in dims.items()}
    for place, value, shared in _numbers(model):
        module, start = modules[place.owner], f"{place.owner}." if place.owner else ""
        kind = type(module)
        if value < 2 or place in known:
            continue
        if kind not in codes:
            codes[kind] = _Code(kind)
        path = place.path[0], _text(place.path[1:])
        parts = [start + child for child in codes[kind].made_with(*path)]
        if not parts and len(place.path) == 2 and isinstance(place.path[1], int) and codes[kind].goes_through(path[0]):
            parts = [start + child for child in (*module._modules, *module._parameters)]
        fitting = (t for t in below.get(place.owner, ()) if parts and value in sizes[t])
        tensors = tuple(t for t in fitting if any(t == part or t.startswith(f"{part}.") for part in parts))
        if tensors:
            ones = frozenset(key for key, one in vars(module).items() if is_number(one) and one == 1)
            yield Stated(place, value, tensors, codes[kind].computed(*path, ones, shared), shared)


def _numbers(model: nn.Module) -> Iterator[tuple[Place, int, bool]]:
    """The whole numbers that modules hold, also in configs, and those that their classes hold: where, and whether so.

    What is in the configs of libraries is known from how these build a model.
    """
    found: list[tuple[Place, int]] = []
    modules = dict(model.named_modules())

    def look(value: Any, place: Place) -> Any:
        if is_number(value):
            found.append((place, value))
        return value

    Walk(model).replace(look, among={owner for owner, module in modules.items() if not is_torchs(type(module))})
    for place, value in found:
        kind = type(modules[place.owner])
        if len(place.path) == 1 or kind.__module__.partition(".")[0] not in _DESCRIBED:
            yield place, value, False
    for owner, module in modules.items():
        for kind in type(module).__mro__:
            for name, value in () if is_torchs(kind) else vars(kind).items():
                if is_number(value) and name not in vars(module):
                    yield Place(owner, (name,)), value, True


def _text(path: Sequence[Any]) -> str:
    """The rest of a path as it is written in code.

    >>> from secateur.state.held import Key
    >>> _text(("model", Key("width"), 0))
    ".model['width'][0]"
    """
    return "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in path)


def tensors_below(tensors: Iterable[str]) -> dict[str, list[str]]:
    """The tensors of each module and of those below it.

    >>> tensors_below(["a.b.weight"])
    {'a.b': ['a.b.weight'], 'a': ['a.b.weight'], '': ['a.b.weight']}
    """
    found: dict[str, list[str]] = {}
    for tensor in tensors:
        owner = tensor
        while owner:
            owner = owner.rpartition(".")[0]
            found.setdefault(owner, []).append(tensor)
    return found


class _Code:
    """What the source of a class, and of those that it is derived from, says about an attribute."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self._every = every = [f for base in kind.__mro__ if not is_torchs(base) for f in functions_of(base)]
        self._constructors = [function for function in every if function.__name__ == "__init__"]
        first = {*_AT_FIRST, *(name for function in self._constructors for name in function.__code__.co_names)}
        self._others = [function for function in every if function.__name__ not in first]
        self.made_with = cache(self._made_with)
        self.computed = cache(self._computed)

    def _made_with(self, attribute: str, rest: str) -> frozenset[str]:
        """The other attributes that constructors make with its value, or that of something in it."""
        return frozenset(
            child
            for function in self._constructors
            if attribute in function.__code__.co_names
            for child in _made_by(function.__code__, function.__code__.co_filename, attribute, rest)
        )

    def goes_through(self, attribute: str) -> bool:
        """Whether constructors and other code read an attribute: a list of sizes, of which a loop makes layers."""
        readers = {f.__name__ == "__init__" for f in self._every if attribute in f.__code__.co_names}
        return len(readers) == 2

    def _computed(self, attribute: str, rest: str, ones: frozenset[str], read: bool) -> str:
        """Where code other than that computes with it, or reads it at all: file and line, or nothing.

        What holds 1 changes nothing.
        """
        for code in (function.__code__ for function in self._others):
            if attribute in code.co_names:
                line = _computed_at(code, code.co_filename, attribute, rest, ones, read)
                if line is not None:
                    return f"{Path(code.co_filename).name}:{line}"
        return ""


@lru_cache(_MOST_ASKED)
def _made_by(code: types.CodeType, file: str, attribute: str, rest: str) -> frozenset[str]:
    """The attributes that a constructor makes by calls that are given the value of another one."""
    tree = _read(code, file)
    return frozenset(() if tree is None else _made_with(tree, attribute, rest))


@lru_cache(_MOST_ASKED)
def _computed_at(
    code: types.CodeType, file: str, attribute: str, rest: str, ones: frozenset[str], read: bool
) -> int | None:
    """The first line of a method that computes with an attribute, or reads it at all."""
    tree = _read(code, file)
    if tree is None:
        return None
    me = tree.args.args[0].arg
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    same, ones_here = _texts(tree, attribute, rest), {f"{me}.{one}" for one in ones}
    for node in (n for n in above if isinstance(n, ast.expr) and ast.unparse(n) in same):
        if read or _computes(node, above, ones_here):
            return code.co_firstlineno + node.lineno - 1
    return None


def _texts(tree: ast.FunctionDef, attribute: str, rest: str) -> set[str]:
    """The ways in which a function writes a number that is an attribute, or in one: also by names of its own."""
    me, made = tree.args.args[0].arg, list(assigned(tree))
    found = {f"{me}.{attribute}{rest}"}
    for one, other in (*made, *((value, to) for to, value in made)):
        if own_name(one, me) == attribute:
            found |= {other.id + rest} if isinstance(other, ast.Name) else {*_parts(other, rest)}
    return found | {to.id for to, value in made if isinstance(to, ast.Name) and ast.unparse(value) in found}


def _parts(value: ast.expr, rest: str) -> Iterator[str]:
    """What is written for a part of something: `w` for `['width']` of `dict(width=w)`, or for `[0]` of `(w, h)`.

    A literal says nothing: another one that is written alike need not mean the same.
    """
    written: list[tuple[str, ast.expr]] = []
    if isinstance(value, ast.Dict):
        written = [(_index(key), each) for key, each in zip(value.keys, value.values, strict=True) if key]
    elif isinstance(value, ast.Tuple | ast.List):
        written = [(f"[{at}]", each) for at, each in enumerate(value.elts)]
    elif isinstance(value, ast.Call) and ast.unparse(value.func) == "dict":
        written = [(f"[{each.arg!r}]", each.value) for each in value.keywords]
    yield from (ast.unparse(each) for at, each in written if at == rest and not isinstance(each, ast.Constant))
    if any(isinstance(each, ast.Call) and ast.unparse(each) == "locals()" for each in ast.walk(value)):
        yield rest[2:-2]


def _index(key: ast.expr) -> str:
    return f"[{key.value!r}]" if isinstance(key, ast.Constant) else ""


def _made_with(tree: ast.FunctionDef, attribute: str, rest: str) -> Iterator[str]:
    """Those that a constructor's source shows."""
    me, called = tree.args.args[0].arg, _texts(tree, attribute, rest)
    for to, value in assigned(tree):
        if (child := own_name(to, me)) and child != attribute and not called.isdisjoint(_arguments(value)):
            yield child
    for node in ast.walk(tree):
        adds = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        child = own_name(adds.value, me) if adds is not None and adds.attr in _ADDS else ""
        if child and not called.isdisjoint(_arguments(node)):
            yield child


def coded(model: nn.Module) -> dict[type, list[Place]]:
    """The classes that are not torch's own of modules, and the user's of what these hold in attributes; and where."""
    found: dict[type, list[Place]] = {}
    for name, module in model.named_modules():
        if not is_torchs(type(module)):
            found.setdefault(type(module), []).append(Place(name, ()))
            for key, value in vars(module).items() if is_users(type(module)) else ():
                if type(value) not in ATOMS and hasattr(value, "__dict__") and is_users(type(value)):
                    found.setdefault(type(value), []).append(Place(name, (key,)))
    return found


def is_torchs(kind: type) -> bool:
    """Whether a class is torch's own, whose code needs no reading."""
    return kind.__module__.partition(".")[0] in ("torch", "builtins")


def is_users(kind: type) -> bool:
    """Whether a class is of the user's own code, not of something that is installed."""
    home = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return not is_torchs(kind) and "site-packages" not in home


def functions_of(kind: type) -> Iterator[types.FunctionType]:
    """The methods of a class itself, those behind properties included."""
    for item in [*vars(kind).values()]:  # to ask a class for its annotations may add to them
        function = item.fget if isinstance(item, property) else item
        function = inspect.unwrap(function) if isinstance(function, types.FunctionType) else None
        if isinstance(function, types.FunctionType):
            yield function


def methods_of(kind: type) -> dict[str, types.FunctionType]:
    """The methods of the user's that a class has, by name."""
    return {f.__name__: f for base in kind.__mro__[::-1] if is_users(base) for f in functions_of(base)}


def named(function: types.FunctionType, name: str) -> Any:
    """What a name stands for that is not a function's own: what it closes over, or a global variable."""
    if name in function.__code__.co_freevars:
        try:
            return (function.__closure__ or ())[function.__code__.co_freevars.index(name)].cell_contents
        except (IndexError, ValueError):  # nothing yet
            return None
    return function.__globals__.get(name)


def named_function(node: ast.AST, function: types.FunctionType, me: str, kind: type) -> types.FunctionType | None:
    """The function that some code names: a method, one in a Python module or in a class, or a variable."""
    found: Any = None
    if isinstance(node, ast.Name):
        found = named(function, node.id)
    elif isinstance(node, ast.Attribute):
        of = node.value.id if isinstance(node.value, ast.Name) else ""
        owner = kind if of in (me, "cls") else named(function, of)
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") in ("super", "type"):
            owner = kind
        if isinstance(owner, types.ModuleType):
            found = vars(owner).get(node.attr)
        elif isinstance(owner, type):
            every = (vars(base).get(_private(node.attr, base)) for base in owner.__mro__)
            found = next((each for each in every if each is not None and each is not function), None)
    found = getattr(found, "__func__", found)  # of a static method, or of one of the class
    found = inspect.unwrap(found) if isinstance(found, types.FunctionType) else None
    return found if isinstance(found, types.FunctionType) and found is not function else None


def _private(name: str, kind: type) -> str:
    """A name as a class spells it."""
    spelt = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if spelt else name


def parsed(function: types.FunctionType) -> ast.FunctionDef | None:
    """The source of a method, if there is any; it is read once, so nobody changes what comes back."""
    return _read(function.__code__, function.__code__.co_filename)


@lru_cache(_MOST_READ)
def _read(code: types.CodeType, _file: str) -> ast.FunctionDef | None:
    """Code is equal to that of another file with the same lines, which `_file` tells apart."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except Exception:  # it was typed in or made by code, or the file has changed since
        return None
    return tree if isinstance(tree, ast.FunctionDef) and tree.args.args else None


@lru_cache(4 * _MOST_READ)
def words(code: types.CodeType) -> frozenset[str]:
    """Every name in some code, which is quicker to ask than its source.

    >>> sorted(words((lambda x: [y.flip(0) for y in zip(x)]).__code__))
    ['flip', 'x', 'y', 'zip']
    """
    inner = (words(one) for one in code.co_consts if isinstance(one, types.CodeType))
    own = {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}
    return frozenset(name for name in own.union(*inner) if not name.startswith("."))


def own_name(node: ast.AST, me: str) -> str:
    """The name in `self.name`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me:
        return node.attr
    return ""


def assigned(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is assigned to what; `a, b = c, d` one by one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value


def _arguments(node: ast.AST) -> Iterator[str]:
    """What is given to the calls in an expression, as it is written; of tuples and lists, what is in them."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                for one in argument.elts if isinstance(argument, ast.Tuple | ast.List) else (argument,):
                    yield ast.unparse(one)


def _computes(node: ast.AST, above: Mapping[ast.AST, ast.AST], ones: Collection[str]) -> bool:
    """Whether a number goes into arithmetic of sizes or bounds a slice, before it is given to anything."""
    while (parent := above.get(node)) is not None:
        if isinstance(parent, ast.Slice):
            return True
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, _OF_SIZES):
            by_one = isinstance(parent.op, ast.FloorDiv | ast.Mult) and ast.unparse(parent.right) in ones
            if not by_one:
                return True
        if isinstance(parent, ast.Call | ast.stmt):
            return False
        node = parent
    return False


__all__ = [
    "Stated",
    "assigned",
    "coded",
    "functions_of",
    "is_torchs",
    "is_users",
    "methods_of",
    "named",
    "named_function",
]
__all__ += ["own_name", "parsed", "stated_sizes", "tensors_below", "words"]
