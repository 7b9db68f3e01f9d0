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
import enum
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from secateur.state.held import Place, read
from secateur.tracing.capture import Beside
from secateur.tracing.examples import arguments, by_name
from secateur.tracing.purity import Purity
from secateur.tracing.questions import Question, asked, own_names, shapes
from secateur.tracing.stated import coded, is_users, methods_of, parsed

_SOMETHING = "something else"
_MOST = 4  # that are tried of each kind

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
    """Attributes as they are not now: what each might hold, and who asks."""

    values: dict[Place, Any]
    where: str
    guessed: bool = False  # made up, to be something else than what it is compared with
    trained: bool = False  # whether the code asks about training mode, too

    def __str__(self) -> str:
        place, value = next(iter(self.values.items()))
        return f"{place} = {value!r}"


@dataclass(frozen=True)
class OtherMethod:
    """A method of a class, the ways in which it may be called, likeliest first, and where it is."""

    name: str
    ways: tuple[Beside, ...]
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
            texts = dict.fromkeys((*_compared_with(tree, name), *_written(p.annotation)))
            yield from ((name, {**given, name: value}) for value in texts if value is not None and value != now)


def keys_asked(model: nn.Module, example: Any) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Keys by which forward asks an argument that is a dict, or further arguments, and that are not there.

    With each, an example in which it is true, if that is all that is asked.
    """
    signature, given = _given(model, example)
    tree = parsed(inspect.unwrap(type(model).forward)) if is_users(type(model)) else None
    for name, p in signature.parameters.items() if tree is not None else ():
        further = p.kind is p.VAR_KEYWORD
        there: Any = {} if further else given.get(name)
        for key, flag in _keys(tree, name).items() if type(there) is dict else ():
            more = {**given, key: True} if further else {**given, name: {**there, key: True}}
            if key not in there and key not in given:
                yield f"{name}[{key!r}]", more if flag else None


def _keys(tree: ast.FunctionDef | None, name: str) -> dict[str, bool]:
    """The keys that code asks a dict for, and whether all that it asks is whether what is there is true."""
    found: dict[str, bool] = {}
    for node in ast.walk(tree) if tree is not None else ():
        flags = _truths(node.test) if isinstance(node, ast.If | ast.IfExp | ast.While) else []
        for each, flag in ((node, False), *((test, True) for test in flags)):
            key: ast.expr | None = None
            if isinstance(each, ast.Call) and ast.unparse(each.func) == f"{name}.get" and each.args:
                key = each.args[0]
            elif isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.In | ast.NotIn):
                key = each.left if ast.unparse(each.comparators[0]) == name else None
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                found[key.value] = found.get(key.value, False) or (flag and isinstance(each, ast.Call))
    return found


def _truths(test: ast.expr) -> list[ast.expr]:
    """What a test asks whether it is true."""
    if isinstance(test, ast.BoolOp):
        return [each for value in test.values for each in _truths(value)]
    return _truths(test.operand) if isinstance(test, ast.UnaryOp) else [test]


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
        found = methods_of(kind)
        reached, module, idle_here = _reached(found), model.get_submodule(names[0]), _first_names(names, idle)
        for name in (name for name in found if name not in reached and not name.startswith("_")):
            tree = parsed(found[name])
            own = own_names(tree.args.args[0].arg, tree) if tree is not None else frozenset[str]()
            if tree is not None and (shapes(found[name], _class(module)) or own & idle_here):
                computes = Purity(module, found).computes(name)
                layers = not own.isdisjoint((*found, *module._modules, *module._parameters))
                numbers = _ways(_needed(found[name]), _needed(kind.forward), layers) if computes else []
                ways = tuple(Beside(name, tuple(names), number) for number in numbers)
                code = found[name].__code__
                where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                yield OtherMethod(f"{kind.__name__}.{name}", ways, where)


def _class(module: nn.Module) -> type:
    return type(module)


def _reached(functions: Mapping[str, FunctionType]) -> set[str]:
    """Those methods that forward calls, or that are called by these, or set up a model."""
    todo, reached = ["forward", "__init__"], set[str]()
    while todo:
        name = todo.pop()
        if name in functions and name not in reached:
            reached.add(name)
            tree = parsed(functions[name])
            todo += functions[name].__code__.co_names if tree is None else _own_or_inherited(tree)
    return reached


def _own_or_inherited(tree: ast.FunctionDef) -> Iterator[str]:
    """The names of what a method has of its own module, or of `super()`; not those of other things' methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (tree.args.args[0].arg, "super()"):
            yield node.attr


def _ways(needs: list[str], given: list[str], layers: bool) -> list[int | None]:
    """What a method may be called with: what forward is given, or one of the tensors that it puts out, by number.

    Arguments of other names are tried where the method has `layers` to tell what fits.
    """
    if not needs or needs == given:
        return [None] if needs else []
    same = [None] if len(needs) >= len(given) else []
    return [*same, *(range(_MOST) if len(needs) == 1 else ())] if layers else []


def _needed(function: Any) -> list[str]:
    """The arguments of a method that have no default."""
    own = inspect.signature(function).parameters.values()
    return [p.name for p in own if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD][1:]


def other_attributes(model: nn.Module, idle: Collection[str] = ()) -> list[Setting]:
    """Attributes that code asks before it takes tensors apart, or does something with `idle` ones, as they might be."""
    found: dict[tuple[type, tuple[Any, ...], str], Setting] = {}
    for kind, holders in coded(model).items():
        names = [place.owner for place in holders if not place.path]
        for question, function, reaches in asked(kind, _first_names(names, idle)):
            code = function.__code__
            where = f"{Path(code.co_filename).name}:{code.co_firstlineno + question.line - 1}"
            for holder in holders:
                place = Place(holder.owner, (*holder.path, *question.path))
                for other, guessed in _otherwise(model, place, question, function, reaches):
                    if is_users(kind) or (len(place.path) == 1 and type(other) in (bool, str)):
                        new = Setting({}, where, guessed, "training" in code.co_names)
                        one = found.setdefault((kind, question.path, repr(other)), new)
                        one.values.setdefault(place, other)
    alone = sorted(found.values(), key=lambda one: one.guessed)
    return [*alone[:_MOST], *_together(alone)][:_MOST]


def other_choices(model: nn.Module) -> Iterator[Setting]:
    """Methods of its own that a module may hold in an attribute in the place of the one that is there."""
    for owner, module in model.named_modules():
        kind = _class(module)
        for key, held in vars(module).items() if is_users(kind) else ():
            if isinstance(held, MethodType) and held.__self__ is module:
                for function in _in_its_place(kind, held.__func__):
                    where = f"{Path(function.__code__.co_filename).name}:{function.__code__.co_firstlineno}"
                    yield Setting({Place(owner, (key,)): MethodType(function, module)}, where)


def _in_its_place(kind: type, held: Any) -> Iterator[FunctionType]:
    """The methods that forward does not call, take tensors apart, and take the same arguments as one that is held."""
    found = methods_of(kind)
    reached = _reached({name: function for name, function in found.items() if name != "__init__"})
    taken = list(inspect.signature(held).parameters)
    for name, function in found.items() if found.get(held.__name__) is held else ():
        alike = function is not held and name not in reached and list(inspect.signature(function).parameters) == taken
        if alike and shapes(function, kind):
            yield function


def _together(settings: Sequence[Setting]) -> Iterator[Setting]:
    """What is asked of several attributes at one place, all of them otherwise."""
    by_place: dict[str, dict[Any, Setting]] = {}
    for one in settings:
        by_place.setdefault(one.where, {}).setdefault(next(iter(one.values)), one)
    for where, several in by_place.items():
        if len(several) > 1:
            values = {place: value for one in several.values() for place, value in one.values.items()}
            yield Setting(values, where, True, any(one.trained for one in several.values()))


def _first_names(owners: Sequence[str], tensors: Iterable[str]) -> set[str]:
    """The attributes of modules by which some tensors are reached from them.

    >>> sorted(_first_names(["", "body"], ["heads.0.weight", "body.scale"]))
    ['body', 'heads', 'scale']
    """
    starts = [f"{owner}." if owner else "" for owner in owners]
    return {t.removeprefix(start).partition(".")[0] for t in tensors for start in starts if t.startswith(start)}


def _otherwise(
    model: nn.Module, place: Place, question: Question, function: FunctionType, guess: bool
) -> Iterator[tuple[Any, bool]]:
    """What an attribute might hold for a question about it to come out otherwise than now; whether that is a guess."""
    test = question.test
    try:
        now = read(model, place)
        if question.works and (now is None or type(now) in (int, float)):
            yield from ((1, True),) if now is None else ()  # most often a number is left out
            return
        if not isinstance(test, ast.Compare):
            yield from ((other, type(now) is not bool) for other in _untrue(now))
            return
        holds, left = _ASKS[type(test.ops[0])], isinstance(test.ops[0], ast.In | ast.NotIn) and _is_constant(test.left)
        other = _constant(test.left if left else test.comparators[0], function)
        if left:
            yield from ((each, False) for each in _with(other, now))
            return
        made_up = guess or (type(now) is str and question.shapes)
        tries = ((each, each is _SOMETHING) for each in (*_near(other, now), *((_SOMETHING,) if made_up else ())))
        yield from islice((each for each in tries if holds(each[0], other) != holds(now, other)), 1)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return  # a property, a part, or not there; compared with what is no constant, or of another kind


def _untrue(now: Any) -> list[Any]:
    """What is true if something is not, and the other way around."""
    if now is None:
        return [True]
    return [type(now)(not now)] if type(now) in (bool, int) else []


def _with(item: Any, now: Any) -> list[Any]:
    """A container with something in it that is not, or without it."""
    kind = type(now)
    if kind in (list, tuple, set, frozenset):
        return [kind(each for each in now if each != item) if item in now else kind([*now, item])]
    return []


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _constant(node: ast.expr, function: FunctionType) -> Any:
    """What is written somewhere: as it is, or as a name of the function's module, or in one (`Mode.SUM`)."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        name, *rest = ast.unparse(node).split(".")
        return functools.reduce(getattr, rest, function.__globals__[name])


def _near(other: Any, now: Any) -> list[Any]:
    """What may be tried in the place of what an attribute holds, by what it is compared with."""
    if type(other) in (tuple, list, set):
        return list(other)
    if isinstance(now, enum.Enum):
        return [other, *type(now)]
    if type(other) in (int, float) and type(now) in (int, float):
        return [other, other + 1, other - 1]
    return [other] if other is None or type(other) is type(now) else []


def _compared_with(tree: ast.AST, name: str) -> Iterator[str]:
    """The texts that something is compared with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq | ast.NotEq):
            other = node.comparators[0]
            if ast.unparse(node.left) == name and isinstance(other, ast.Constant) and isinstance(other.value, str):
                yield other.value


def _written(annotation: Any) -> Iterator[str]:
    """The texts that an annotation says there are: `Literal["mean", "max"]`."""
    text = annotation if isinstance(annotation, str) else str(annotation)
    tree = ast.parse(text, mode="eval") if "Literal[" in text else None
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


__all__ = ["OtherMethod", "Setting", "fewer_arguments", "left_out", "more_arguments", "other_arguments"]
__all__ += ["keys_asked", "other_attributes", "other_choices", "other_methods"]
