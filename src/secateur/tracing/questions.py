"""What code asks of attributes before it takes tensors apart or gives them shapes, read off its source.

    kind = self.config.kind
    if kind == "rolled":
        h = self.roll(h)

asks for `config.kind`, if `roll` takes tensors apart. A question is a test of an `if`, a `while`, a conditional
expression or a `match`, the number of turns of a loop, or a key by which a function is chosen out of several. What it
is about may have a name of its own or be behind a property; what depends on it is in the branches, in what follows a
branch that returns, and in the methods and functions that these call.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import FunctionType, ModuleType
from typing import Any

from secateur.state.held import Key
from secateur.tracing.shaping import MIXING, may_shape_itself, picking, shapes_itself, touches
from secateur.tracing.stated import (
    assigned,
    functions_of,
    is_torchs,
    is_users,
    named,
    named_function,
    own_name,
    parsed,
    words,
)
from secateur.tracing.ways import Decisions, span, ways

_MOST_READ = 1024  # methods whose questions, once found, are remembered
_DEEPEST = 3  # functions that one calls, and these call
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_PLACED = (ast.stmt, ast.expr)  # parts of the source that know where they are


@dataclass(frozen=True)
class Question:
    """What a method asks of an attribute: the way there, what is asked, the line, and what is decided by it."""

    path: tuple[Any, ...]
    test: ast.expr  # a comparison, or what is asked whether it is true
    line: int
    shapes: bool  # code that takes tensors apart, or gives them shapes
    names: frozenset[str]  # attributes of the module that such code names
    works: bool  # what is decided reads the attribute, too: if it is a number, it is one to work with, not a choice


@dataclass(frozen=True)
class Branch:
    """Code that a test decides about, and where it is: lines and columns of its first and last character."""

    test: str
    line: int
    span: tuple[tuple[int, int], tuple[int, int]]
    decisions: Decisions  # what leads there
    tests: tuple[ast.expr, ...] = field(compare=False)
    own: bool  # whether what is asked on the way is about attributes of the module alone
    surely: bool  # whether what it takes apart must be a tensor
    block: tuple[ast.AST, ...] = field(compare=False)


@lru_cache(_MOST_READ)
def questions(function: FunctionType, kind: type) -> tuple[Question, ...]:
    """Those of a method of a class, whose source is looked through once."""
    tree = parsed(function)
    return () if tree is None else tuple(_Reader(function, kind, tree).questions())


@lru_cache(_MOST_READ)
def branches(function: FunctionType, kind: type) -> tuple[Branch, ...]:
    """Branches of a method that take tensors apart or give them shapes, by numbers that the code writes."""
    may = may_shape(function, kind) or not words(function.__code__).isdisjoint(("shape", "size", *MIXING))
    tree = parsed(function) if may else None
    return () if tree is None else tuple(_Reader(function, kind, tree).branches())


class _Written(ast.expr):
    """Stands for a function as if it were written there."""

    def __init__(self, function: FunctionType) -> None:
        super().__init__()
        self.function = function


class _Reader:
    """The source of one method."""

    def __init__(self, function: FunctionType, kind: type, tree: ast.FunctionDef) -> None:
        self._function, self._kind, self._tree = function, kind, tree
        self._me = tree.args.args[0].arg

    def questions(self) -> Iterator[Question]:
        for line, tests, decided in self._decisions():
            shapes, names = self.shape(decided), own_names(self._me, *decided)
            if not shapes and not names:
                continue
            read = {ast.unparse(each) for part in decided for each in _beside_tests(part)}
            for test in tests:
                for path, asked, what in self._ways(test):
                    yield Question(path, what, line, shapes, names, asked in read)

    def branches(self) -> Iterator[Branch]:
        source = inspect.getsource(self._function.__code__)
        shift = len(source) - len(source.lstrip()), self._function.__code__.co_firstlineno - 1
        tests = {span(each): each for each in ast.walk(self._tree) if isinstance(each, ast.expr)}
        picks = picking(self._tree)
        for way in ways(self._tree):
            first, last = way.block[0], way.block[-1]
            if not isinstance(first, _PLACED) or not isinstance(last, _PLACED):
                continue
            asked = tuple(tests[place] for place, _ in way.decisions if place in tests)
            own = len(asked) == len(way.decisions) and all(map(self._own, asked))
            surely = self.shape(way.block, surely=True)
            # A statistic that an attribute decides about is most often one that this model was made without.
            if surely or self.shape(way.block) or picks(way.block) or touches(way.block, statistics=not own):
                begin = first.lineno + shift[1], first.col_offset + shift[0]
                end = (last.end_lineno or 0) + shift[1], (last.end_col_offset or 0) + shift[0]
                yield Branch(way.test, begin[0], (begin, end), way.decisions, asked, own, surely, (*way.block,))

    def _own(self, test: ast.expr) -> bool:
        """Whether a test is about the module's own attributes, and nothing else."""
        if isinstance(test, ast.Compare):
            return all(isinstance(each, ast.Constant) or self._own(each) for each in (test.left, *test.comparators))
        if isinstance(test, ast.BoolOp | ast.UnaryOp):
            return all(map(self._own, test.values if isinstance(test, ast.BoolOp) else [test.operand]))
        return bool(self._way(test))

    # what is decided --------------------------------------------------------------------------------------------

    def _decisions(self) -> Iterator[tuple[int, list[ast.expr], list[ast.AST]]]:
        """The line of each decision, what is asked there, and the code that it decides about."""
        after = _after(self._tree)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.If | ast.IfExp | ast.While):
                tests = [each for each in ast.walk(node.test) if isinstance(each, ast.expr)]
                decided = [part for _, block in _blocks(node) for part in block]
                yield node.lineno, tests, [*decided, *after.get(node, ())]
            elif isinstance(node, ast.Match):
                patterns = (each for case in node.cases for each in ast.walk(case.pattern))
                tests = [_equals(node.subject, each.value) for each in patterns if isinstance(each, ast.MatchValue)]
                yield node.lineno, tests, [part for case in node.cases for part in case.body]
            elif isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and len(node.iter.args) == 1:
                if ast.unparse(node.iter.func) == "range":
                    yield node.lineno, [node.iter.args[0]], [*node.body]
            elif (looked := _looked_up(node)) is not None:
                table, key, line = looked
                written = table if isinstance(table, ast.Dict) else None
                held = {} if written is not None else self._table(table)
                keys = [each for each in written.keys if each is not None] if written is not None else []
                keys += [ast.Constant(each) for each in held]
                values: list[ast.AST] = [*written.values] if written is not None else [*map(_Written, held.values())]
                yield line, [_equals(key, each) for each in keys], values
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
                yield node.lineno, *self._by_name(*node.args[:2])

    def _table(self, node: ast.expr) -> dict[Any, FunctionType]:
        """The functions of a table that the class or the Python module has: `STEPS` in `STEPS[self.step](x)`."""
        name = own_name(node, self._me)
        known = vars(self._kind) if name else self._function.__globals__
        return _tabled(known.get(name or getattr(node, "id", "")))

    def _by_name(self, owner: ast.expr, name: ast.expr) -> tuple[list[ast.expr], list[ast.AST]]:
        """The methods that `getattr(self, "start_" + self.kind)` chooses from."""
        if isinstance(name, ast.BinOp):
            parts: list[ast.expr] = [name.left, name.right]
        else:
            parts = name.values if isinstance(name, ast.JoinedStr) else []
        start, rest = (*parts, None, None)[:2] if len(parts) == 2 else (None, None)
        rest = rest.value if isinstance(rest, ast.FormattedValue) else rest
        if rest is None or ast.unparse(owner) != self._me or not isinstance(start, ast.Constant):
            return [], []
        found = [n for n in dir(self._kind) if start.value and n.startswith(str(start.value))]
        tests = [_equals(rest, ast.Constant(n.removeprefix(str(start.value)))) for n in found]
        return tests, [ast.Attribute(ast.Name(self._me, ast.Load()), n, ast.Load()) for n in found]

    def shape(self, code: Iterable[ast.AST], surely: bool = False, depth: int = _DEEPEST) -> bool:
        """Whether code takes tensors apart, or gives them shapes; `surely`: whatever runs there, it meets a tensor."""
        for each in (inner for part in code for inner in ast.walk(part)):
            if shapes_itself(each, surely):
                return True
            called = self._called(each) if depth else None
            if called is not None and shapes(called, self._kind, surely, depth - 1):
                return True
        return False

    def _called(self, node: ast.AST) -> FunctionType | None:
        """The method of its own, or the function of the user's, that some code names."""
        if isinstance(node, _Written):
            return node.function
        return _of_the_user(named_function(node, self._function, self._me, self._kind), self._kind)

    # what is asked ----------------------------------------------------------------------------------------------

    def _ways(self, test: ast.expr) -> Iterator[tuple[tuple[Any, ...], str, ast.expr]]:
        """What a test asks: the way to an attribute, that as it is written, and the test with it on the left."""
        asked, what = test, test
        if isinstance(test, ast.Compare):
            asked = test.left
            if not self._way(asked) and len(test.ops) == 1:
                asked = test.comparators[0]
        path = self._way(asked)
        if not path:
            return
        behind = getattr(self._kind, path[0], None) if len(path) == 1 else None
        if not isinstance(behind, property):
            yield path, ast.unparse(asked), what
        elif isinstance(behind.fget, FunctionType) and behind.fget is not self._function:
            tree = parsed(behind.fget)
            reader = _Reader(behind.fget, self._kind, tree) if tree is not None else self
            for each in (node for node in ast.walk(tree or ast.Pass()) if isinstance(node, ast.expr)):
                yield from reader._ways(each)

    @cached_property
    def _names(self) -> dict[str, tuple[Any, ...]]:
        """The variables that are but another name of an attribute."""
        found: dict[str, list[ast.expr]] = {}
        for to, value in assigned(self._tree):
            if isinstance(to, ast.Name):
                found.setdefault(to.id, []).append(value)
        names: dict[str, tuple[Any, ...]] = {}
        for name, values in found.items():
            path = _way(values[0], self._me, names) if len(values) == 1 else ()
            if path:
                names[name] = path
        return names

    def _way(self, node: ast.expr) -> tuple[Any, ...]:
        return _way(node, self._me, self._names)


def _named(own: str, name: str, function: FunctionType, kind: type) -> FunctionType | None:
    found = getattr(kind, own, None) if own else named(function, name)
    found = inspect.unwrap(found) if isinstance(found, FunctionType) else None
    return None if found is function else _of_the_user(found, kind)


def _of_the_user(found: Any, kind: type) -> FunctionType | None:
    theirs = not isinstance(found, FunctionType) or not _followed(kind) or "site-packages" in found.__code__.co_filename
    return None if theirs else found


def _tabled(item: object) -> dict[Any, FunctionType]:
    """The functions of a table in which there is nothing else."""
    if not isinstance(item, dict) or not all(isinstance(each, FunctionType) for each in item.values()):
        return {}
    return {key: each for key, each in item.items() if type(key) in (str, int)}


def _followed(kind: type) -> bool:
    """Whether what code calls is looked at: that of the user's classes, or (`object`) of functions of the user's."""
    return kind is object or is_users(kind)


def _way(node: ast.expr, me: str, names: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """The steps to what is written as an attribute, or as something inside of one; empty if it is neither.

    >>> _way(ast.parse("self.config.modes['a']", mode="eval").body, "self", {})
    ('config', 'modes', Key(key='a'))
    """
    if name := own_name(node, me):
        return (name,)
    if isinstance(node, ast.Name):
        return names.get(node.id, ())
    if isinstance(node, ast.Attribute) and (path := _way(node.value, me, names)):
        return (*path, node.attr)
    constant = node.slice if isinstance(node, ast.Subscript) else None
    if isinstance(node, ast.Subscript) and isinstance(constant, ast.Constant):
        path, key = _way(node.value, me, names), constant.value
        return (*path, key if type(key) is int else Key(key)) if path else ()
    return ()


def _looked_up(node: ast.AST) -> tuple[ast.expr, ast.expr, int] | None:
    """Of `table[key]` and `table.get(key)` the table and the key, and the line."""
    if isinstance(node, ast.Subscript):
        return node.value, node.slice, node.lineno
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        return node.func.value, node.args[0], node.lineno
    return None


def _equals(asked: ast.expr, value: ast.expr) -> ast.expr:
    return ast.Compare(asked, [ast.Eq()], [value])


def _blocks(node: ast.AST) -> Iterator[tuple[str, list[Any]]]:
    """The branches of a decision, each with what has to hold for it."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        test = ast.unparse(node.test)
        for sign, block in (("if", node.body), ("unless", node.orelse)):
            if block:
                yield f"{sign} {test}", block if isinstance(block, list) else [block]
    elif isinstance(node, ast.Match):
        for case in node.cases:
            yield f"if {ast.unparse(node.subject)} is {ast.unparse(case.pattern)}", case.body


def _after(tree: ast.AST) -> dict[ast.AST, list[ast.stmt]]:
    """What follows an `if` that one of the branches does not come back from."""
    found: dict[ast.AST, list[ast.stmt]] = {}
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            held = getattr(node, name, None)
            block: list[ast.stmt] = held if isinstance(held, list) else []
            for at, each in enumerate(block):
                if isinstance(each, ast.If) and any(b and isinstance(b[-1], _ENDS) for b in (each.body, each.orelse)):
                    found[each] = block[at + 1 :]
    return found


def _beside_tests(node: ast.AST) -> Iterator[ast.AST]:
    """What is in some code, but for the questions that it asks."""
    yield node
    for name, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) else (value,):
            if name != "test" and isinstance(each, ast.AST):
                yield from _beside_tests(each)


def own_names(me: str, *code: ast.AST) -> frozenset[str]:
    """The attributes of the module that code names."""
    named = (own_name(each, me) for part in code for each in ast.walk(part))
    return frozenset(name for name in named if name)


@lru_cache(_MOST_READ)
def shapes(function: FunctionType, kind: type, surely: bool = False, depth: int = _DEEPEST) -> bool:
    """Whether a method takes tensors apart, or gives them shapes; `surely`: whatever runs there, it meets a tensor."""
    if not may_shape(function, kind, depth):
        return False
    tree = parsed(function)
    if tree is None:  # a lambda
        return not surely
    return _Reader(function, kind, tree).shape(tree.body, surely, depth)


@lru_cache(_MOST_READ)
def may_shape(function: FunctionType, kind: type, depth: int = _DEEPEST) -> bool:
    """What tells, without the source, that a method does not take tensors apart."""
    if may_shape_itself(function.__code__):
        return True
    names = words(function.__code__) if depth and _followed(kind) else frozenset[str]()
    own = {*names, *dir(kind)} if "getattr" in names else names
    called = (
        *(_named(name, "", function, kind) for name in own),
        *(_named("", name, function, kind) for name in names),
    )
    modules = (each for each in (named(function, name) for name in names) if isinstance(each, ModuleType))
    called += (*(_of_the_user(vars(each).get(name), kind) for each in modules for name in names),)
    known = (*(vars(kind).get(name) for name in names), *(function.__globals__.get(name) for name in names))
    tabled = (one for item in known for one in _tabled(item).values()) if depth and _followed(kind) else ()
    return any(one is not None and may_shape(one, kind, depth - 1) for one in (*called, *tabled))


def asked(kind: type, idle: Collection[str]) -> Iterator[tuple[Question, FunctionType, bool]]:
    """The questions of a class that decide about shapes, or by which something `idle` may be reached: whether so."""
    for function in (f for base in kind.__mro__ if not is_torchs(base) for f in functions_of(base)):
        code = function.__code__
        if function.__name__ != "__init__" and (may_shape(function, kind) or not words(code).isdisjoint(idle)):
            for one in questions(function, kind):
                reaches = not one.names.isdisjoint(idle)
                if reaches or one.shapes:
                    yield one, function, reaches


__all__ = ["Branch", "Question", "asked", "branches", "may_shape", "own_names", "questions", "shapes"]
