"""Other ways to use a model: arguments left out or otherwise, attributes that its code asks, methods beside forward.

    def forward(self, x, mask=None, reverse=False):
        if self.mode == "split": ...

goes another way without a mask, in reverse, and where the attribute holds what it is compared with. What these ways are
is read off the signature and the source. Arguments are the caller's to choose, so each is tried. An attribute, or a
method that takes what forward does, is tried only where code takes tensors apart or gives them shapes: other code
follows a cut by itself.
"""

from __future__ import annotations

import ast
import dis
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from secateur.state.held import Key, Place, read
from secateur.tracing.examples import arguments, by_name
from secateur.tracing.purity import Purity
from secateur.tracing.stated import functions_of, is_torchs, is_users, own_name, parsed, words

_SOMETHING = "something else"
_MOST = 4  # that are tried of each kind
_MOST_READ = 1024  # methods whose questions, once found, are remembered
_SHAPING = frozenset(
    (
        *("chunk", "expand", "flip", "fold", "narrow", "pixel_shuffle", "rearrange", "reduce", "repeat", "reshape"),
        *("roll", "split", "tensor_split", "unflatten", "unfold", "view"),
    )
)

_SLICING = frozenset(dis.opmap[name] for name in ("BUILD_SLICE", "BINARY_SLICE", "STORE_SLICE") if name in dis.opmap)


_ASKS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


@dataclass(frozen=True)
class Setting:
    """An attribute of some modules as it is not now: their names, the way to it, what it might hold, and who asks."""

    owners: tuple[str, ...]
    path: tuple[Any, ...]
    value: Any
    where: str
    guessed: bool = False  # made up, to be something else than what it is compared with

    def __str__(self) -> str:
        return f"{Place(self.owners[0], self.path)} = {self.value!r}"


@dataclass(frozen=True)
class OtherMethod:
    """A method of a class, the modules that can call it with what they are given, and where it is."""

    name: str
    owners: tuple[str, ...]
    where: str


def fewer_arguments(model: nn.Module, example: Any) -> Iterator[Any]:
    """An example without the arguments that may be left out: without all of them, and without each."""
    signature, given = _given(model, example)
    extra = [n for n, p in signature.parameters.items() if p.default is None and given.get(n) is not None]
    for left_out in ([extra] if len(extra) > 1 else []) + [[name] for name in extra[:_MOST]]:
        yield {name: value for name, value in given.items() if name not in left_out}


def left_out(model: nn.Module, example: Any) -> list[str]:
    """The arguments of forward that are None unless they are given, and were not."""
    signature, given = _given(model, example)
    return [n for n, p in signature.parameters.items() if p.default is None and given.get(n) is None]


def more_arguments(
    model: nn.Module, example: Any, made: Mapping[str, Any], idle: Iterable[Tensor]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An example with each argument that was left out: what it may be, likeliest first.

    That is what the code has `made` in its place, or what has the shape of an input, is a number for each sample, or
    is as wide as a matrix that is `idle` without it. What those of libraries are has been settled by others.
    """
    _, given = _given(model, example)
    tensors = [value for value in given.values() if isinstance(value, Tensor) and value.ndim]
    if not tensors or not is_users(type(model)):
        return
    first = tensors[0]
    wide = [weight.new_zeros(len(first), weight.shape[1]) for weight in idle if weight.ndim == 2]
    alike = {(tuple(t.shape), t.dtype): t for t in (*tensors, first.new_zeros(len(first), dtype=torch.long), *wide)}
    for name in left_out(model, example)[:_MOST]:
        tries = [made[name], *alike.values()] if name in made else alike.values()
        yield name, [{**given, name: value} for value in islice(tries, _MOST)]


def other_arguments(model: nn.Module, example: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """An example with other values of the arguments by which forward chooses what to do, and which one that is."""
    return islice(_other_arguments(model, example), _MOST)


def _other_arguments(model: nn.Module, example: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    signature, given = _given(model, example)
    tree = parsed(inspect.unwrap(type(model).forward)) if given else None
    for name, p in signature.parameters.items() if given else ():
        now = given.get(name, p.default)
        if type(p.default) is bool and type(now) is bool:
            yield name, {**given, name: not now}
        elif type(p.default) is str and tree is not None:
            asked = dict.fromkeys(_compared(node, name) for node in ast.walk(tree))
            yield from ((name, {**given, name: value}) for value in asked if value is not None and value != now)


def _given(model: nn.Module, example: Any) -> tuple[inspect.Signature, dict[str, Any]]:
    """The arguments of forward by name; none where they have no names, or are not what forward takes."""
    signature = inspect.signature(model.forward)
    args, kwargs = arguments(example)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # hooks may change what forward is called with
        return signature, {}
    return signature, given if set(given) <= by_name(signature) else {}


def other_methods(model: nn.Module, idle: Collection[str] = ()) -> Iterator[OtherMethod]:
    """Methods of modules that forward does not call and that take tensors apart, give them shapes, or read `idle` ones.

    Those of libraries are left alone. What is seen to do nothing but compute may be called.
    """
    owners: dict[type[nn.Module], list[str]] = {}
    for name, module in model.named_modules():
        if is_users(type(module)):
            owners.setdefault(type(module), []).append(name)
    for kind, names in owners.items():
        found = {f.__name__: f for base in kind.__mro__[::-1] if is_users(base) for f in functions_of(base)}
        reached = _reached(found)
        for name in (name for name in found if name not in reached):
            code = found[name].__code__
            tree = parsed(found[name]) if not name.startswith("_") else None
            if tree is not None and (
                _shapes(*tree.body) or _own_names(tree.args.args[0].arg, tree) & _first_names(names, idle)
            ):
                takes = _needed(found[name]) and _needed(found[name]) == _needed(kind.forward)
                takes = takes and Purity(model.get_submodule(names[0]), found).computes(name)
                where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                yield OtherMethod(f"{kind.__name__}.{name}", tuple(names) if takes else (), where)


def _reached(functions: Mapping[str, FunctionType]) -> set[str]:
    """Those methods that forward calls, or that are called by these, or set up a model."""
    todo, reached = ["forward", "__init__"], set[str]()
    while todo:
        name = todo.pop()
        if name in functions and name not in reached:
            reached.add(name)
            todo += functions[name].__code__.co_names
    return reached


def _needed(function: Any) -> list[str]:
    """The arguments of a method that have no default."""
    own = inspect.signature(function).parameters.values()
    return [p.name for p in own if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD][1:]


def other_attributes(model: nn.Module, idle: Collection[str] = ()) -> list[Setting]:
    """Attributes that code asks before it takes tensors apart, or does something with `idle` ones, as they might be."""
    owners: dict[type[nn.Module], list[str]] = {}
    for name, module in model.named_modules():
        if not is_torchs(type(module)):
            owners.setdefault(type(module), []).append(name)
    found: dict[tuple[type, tuple[Any, ...], str], Setting] = {}
    for kind, names in owners.items():
        for path, test, where, reaches in _asked(kind, _first_names(names, idle)):
            for owner in names:
                for other, guessed in _otherwise(model, Place(owner, path), test, reaches):
                    if is_users(kind) or (len(path) == 1 and type(other) in (bool, str)):
                        one = found.setdefault((kind, path, repr(other)), Setting((), path, other, where, guessed))
                        owned = tuple(dict.fromkeys((*one.owners, owner)))
                        found[kind, path, repr(other)] = replace(one, owners=owned)
    return list(found.values())[:_MOST]


def _first_names(owners: Sequence[str], tensors: Iterable[str]) -> set[str]:
    """The attributes of modules by which some tensors are reached from them.

    >>> sorted(_first_names(["", "body"], ["heads.0.weight", "body.scale"]))
    ['body', 'heads', 'scale']
    """
    starts = [f"{owner}." if owner else "" for owner in owners]
    return {t.removeprefix(start).partition(".")[0] for t in tensors for start in starts if t.startswith(start)}


def _asked(kind: type[nn.Module], idle: Collection[str]) -> Iterator[tuple[tuple[Any, ...], ast.expr, str, bool]]:
    """The attributes that decide about shapes: the way there, the question, file and line.

    So do those by which something `idle` may be reached; whether it is so, too.
    """
    for function in (f for base in kind.__mro__ if not is_torchs(base) for f in functions_of(base)):
        code = function.__code__
        may = function.__name__ != "__init__" and (_may_shape(code) or not words(code).isdisjoint(idle))
        if not may or (tree := parsed(function)) is None:
            continue
        for one in _questions(tree):
            reaches = not one.names.isdisjoint(idle)
            if reaches or one.shapes:
                where = f"{Path(code.co_filename).name}:{code.co_firstlineno + one.line - 1}"
                yield one.path, one.test, where, reaches


@dataclass(frozen=True)
class _Question:
    """What a method asks of an attribute: the way there, the test, its line, and what is decided by it."""

    path: tuple[Any, ...]
    test: ast.expr
    line: int
    shapes: bool  # code that takes tensors apart, or gives them shapes
    names: frozenset[str]  # attributes of the module that such code names


@lru_cache(_MOST_READ)
def _questions(method: ast.FunctionDef) -> tuple[_Question, ...]:
    """Those of a method's source, which is looked through once."""
    me, found = method.args.args[0].arg, list[_Question]()
    for node in ast.walk(method):
        if not isinstance(node, ast.If | ast.IfExp):
            continue
        branches = _decided(node)
        shapes, names = _shapes(*branches), _own_names(me, *branches)
        read = {ast.unparse(each) for part in branches for each in _beside_tests(part)} if shapes or names else set()
        for test in (each for each in ast.walk(node.test) if isinstance(each, ast.expr)):
            asked = test.left if isinstance(test, ast.Compare) else test
            # What the branch reads, too, is a number that it works with, not a choice.
            if (shapes or names) and (path := _way(asked, me)) and ast.unparse(asked) not in read:
                found.append(_Question(path, test, node.lineno, shapes, names))
    return tuple(found)


def _beside_tests(node: ast.AST) -> Iterator[ast.AST]:
    """What is in some code, but for the questions that it asks."""
    yield node
    for name, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) else (value,):
            if name != "test" and isinstance(each, ast.AST):
                yield from _beside_tests(each)


def _way(node: ast.expr, me: str) -> tuple[Any, ...]:
    """The steps to what is written as an attribute, or as something inside of one; empty if it is neither.

    >>> _way(ast.parse("self.config.modes['a']", mode="eval").body, "self")
    ('config', 'modes', Key(key='a'))
    """
    if name := own_name(node, me):
        return (name,)
    if isinstance(node, ast.Attribute) and (path := _way(node.value, me)):
        return (*path, node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and (path := _way(node.value, me)):
        key = node.slice.value
        return (*path, key if type(key) is int else Key(key))
    return ()


def _otherwise(model: nn.Module, place: Place, test: ast.expr, guess: bool) -> Iterator[tuple[Any, bool]]:
    """What an attribute might hold for a question about it to come out otherwise than now; whether that is a guess."""
    try:
        now = read(model, place)
    except (AttributeError, IndexError, KeyError, TypeError):  # a property, a part, or not there
        return
    if not isinstance(test, ast.Compare):
        if type(now) is bool:
            yield not now, False
        return
    try:
        other = ast.literal_eval(test.comparators[0])
        holds = _ASKS[type(test.ops[0])]
        tries = ((each, each is _SOMETHING) for each in (*_near(other, now), *((_SOMETHING,) if guess else ())))
        yield from islice((each for each in tries if holds(each[0], other) != holds(now, other)), 1)
    except (KeyError, TypeError, ValueError):  # compared with something else than a constant, or with another kind
        return


def _near(other: Any, now: Any) -> list[Any]:
    """What may be tried in the place of what an attribute holds, by what it is compared with."""
    if type(other) in (tuple, list, set):
        return list(other)
    if type(other) in (int, float) and type(now) in (int, float):
        return [other, other + 1, other - 1]
    return [other] if other is None or type(other) is type(now) else []


def _compared(node: ast.AST, name: str) -> str | None:
    """The text that something is compared with."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq | ast.NotEq):
        other = node.comparators[0]
        if ast.unparse(node.left) == name and isinstance(other, ast.Constant) and isinstance(other.value, str):
            return other.value
    return None


def _decided(node: ast.If | ast.IfExp) -> list[ast.AST]:
    return [node.body, node.orelse] if isinstance(node, ast.IfExp) else [*node.body, *node.orelse]


def _shapes(*branches: ast.AST) -> bool:
    """Whether code takes tensors apart, or gives them shapes."""
    for each in (inner for branch in branches for inner in ast.walk(branch)):
        if isinstance(each, ast.Slice) and any(map(_far, (each.lower, each.upper, each.step))):
            return True
        name = getattr(each.func, "attr", getattr(each.func, "id", "")) if isinstance(each, ast.Call) else ""
        if name in _SHAPING:
            return True
    return False


def _may_shape(code: CodeType) -> bool:
    """What tells, without the source, that code does not take tensors apart."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    sliced = not _SLICING.isdisjoint(code.co_code[::2]) or any(type(one) is slice for one in code.co_consts)
    return sliced or not _SHAPING.isdisjoint(words(code)) or any(map(_may_shape, inner))


def _own_names(me: str, *branches: ast.AST) -> frozenset[str]:
    """The attributes of the module that code names."""
    named = (own_name(each, me) for branch in branches for each in ast.walk(branch))
    return frozenset(name for name in named if name)


def _far(bound: ast.expr | None) -> bool:
    """Whether the bound of a slice is more than a step from either end."""
    text = ast.unparse(bound) if bound is not None else "0"
    return text not in ("0", "1", "-1")


__all__ = ["OtherMethod", "Setting", "fewer_arguments", "left_out", "more_arguments", "other_arguments"]
__all__ += ["other_attributes", "other_methods"]
