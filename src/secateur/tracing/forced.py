"""Branches that no run has taken, taken by force.

    if torch.is_grad_enabled() and CONFIG["turned"]:
        h = turned(h)

What leads to a branch may be anything: a setting of the user's, of torch or of the system, the size of a batch. None of
it need be known to see what the branch does to axes. For one run the function has other code, in which the tests on the
way come out as they must; each is carried out nevertheless, since it may give names to things. Other threads, which may
run the same function meanwhile, go their own way.
"""

from __future__ import annotations

import ast
import copy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

from secateur.sizes.explain import is_capture
from secateur.tracing.questions import Branch
from secateur.tracing.stated import parsed
from secateur.tracing.ways import Extent, span

_forcing: ContextVar[bool] = ContextVar("forcing", default=False)
_lock = threading.RLock()
_MARK = "\0secateur: "
_MOST_TIMES = 1000  # that a test comes out as it is told to: a loop may never end otherwise


@dataclass(frozen=True)
class Forced:
    """A branch of a function that is to be taken."""

    function: FunctionType
    branch: Branch

    def fits(self, others: Iterable[Forced]) -> bool:
        """Whether it can be taken in one run with others."""
        mine = dict(self.branch.decisions)
        pairs = (pair for one in others if one.function is self.function for pair in one.branch.decisions)
        return all(mine.get(where, outcome) == outcome for where, outcome in pairs)


class _Outcome:
    """Stands in code as `outcome[test]`: what the test comes to where the code is forced.

    A `while` turns once, or it would go on for ever; a `for` that has nothing to go through, too.
    """

    def __init__(self, outcome: bool) -> None:
        self._outcome: Any = outcome
        self.loop: type[ast.AST] | None = None
        self._times = 0

    @property
    def asked(self) -> bool:
        """Whether code came to it."""
        return self._times > 0

    def __getitem__(self, value: Any) -> Any:
        often = self._times == (1 if self.loop is ast.While else _MOST_TIMES)
        if often or not _forcing.get() or _within_itself(sys._getframe(1)):
            return value
        if self.loop is ast.For:
            if not isinstance(value, Sized) or len(value):
                return value
            self._outcome = (0,) if isinstance(value, range) else (1,)
        self._times += 1
        return self._outcome


def _within_itself(frame: FrameType) -> bool:
    """Whether a function runs within a call of its own."""
    outer = frame.f_back
    while outer is not None and not is_capture(outer):
        if outer.f_code is frame.f_code:
            return True
        outer = outer.f_back
    return False


@contextmanager
def forced(branches: Sequence[Forced]) -> Iterator[set[Forced]]:
    """Functions take these branches, as far as they have source; afterwards it is known which of them were come to."""
    taken = set[Forced]()
    if not branches:
        yield taken
        return
    decisions: dict[FunctionType, dict[Extent, _Outcome]] = {}
    for each in branches:
        own = decisions.setdefault(each.function, {})
        own.update({where: _Outcome(outcome) for where, outcome in each.branch.decisions if where not in own})
    with _lock:
        before = {function: function.__code__ for function in decisions}
        token = _forcing.set(True)
        try:
            for function, outcomes in decisions.items():
                function.__code__ = _decided(function, outcomes) or function.__code__
            yield taken
        finally:
            _forcing.reset(token)
            for function, code in before.items():
                function.__code__ = code
    taken |= {each for each in branches if decisions[each.function][each.branch.decisions[-1][0]].asked}


def _decided(function: FunctionType, decisions: Mapping[Extent, _Outcome]) -> CodeType | None:
    """The code of a function with tests that come out as they are told to; None where that cannot be made."""
    tree, old = copy.deepcopy(parsed(function)), function.__code__
    if tree is None:
        return None
    outcomes = dict[str, _Outcome]()

    def put(test: ast.expr, where: Extent, loop: type[ast.AST] | None = None) -> ast.expr:
        if where not in decisions:
            return test
        mark = f"{_MARK}{len(outcomes)}"
        outcomes[mark] = decisions[where]
        outcomes[mark].loop = loop
        return ast.copy_location(ast.Subscript(ast.Constant(mark), test, ast.Load()), test)

    for node in ast.walk(tree):
        _put(node, put, decisions)
    ast.increment_lineno(tree, old.co_firstlineno - 1)
    for made in _codes(_compiled(tree, function)):
        same = made.co_name == old.co_name and made.co_firstlineno == old.co_firstlineno
        if same and made.co_freevars == old.co_freevars:
            return _with_outcomes(made, outcomes)
    return None


def _put(node: ast.AST, put: Callable[..., ast.expr], decisions: Mapping[Extent, _Outcome]) -> None:
    """Let outcomes decide about the branches of a part of some code."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = put(node.test, span(node.test), type(node))
    elif isinstance(node, ast.BoolOp):
        node.values[0] = put(node.values[0], span(node.values[0]))
    elif isinstance(node, ast.For):
        node.iter = put(node.iter, span(node.iter), ast.For)
    elif isinstance(node, ast.Try):
        for each in [each for each in node.handlers if span(each) in decisions]:
            kind = each.type.elts[0] if isinstance(each.type, ast.Tuple) else each.type
            error = ast.Raise(kind or ast.Name("Exception", ast.Load()), None)
            node.body.insert(0, ast.If(put(ast.Constant(False), span(each)), [error], []))
    elif isinstance(node, ast.Match):
        for case in [case for case in node.cases if span(case.pattern) in decisions]:
            always = ast.match_case(ast.MatchAs(None, None), put(ast.Constant(False), span(case.pattern)), case.body)
            node.cases.insert(0, always)


def _compiled(tree: ast.FunctionDef, function: FunctionType) -> CodeType:
    """A function inside of a class of its name, whose private names are spelled so, and of what it closes over."""
    free = [name for name in function.__code__.co_freevars if name != "__class__"]
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    kind = ast.ClassDef(owner if owner.isidentifier() else "_", [], [], [tree], [])
    names = [ast.arg(name) for name in free]
    outside: list[ast.stmt] = (
        [] if kind.name in free else [ast.Global([kind.name])]
    )  # for whom the name stays what it is
    around = ast.FunctionDef("around", ast.arguments([], names, None, [], [], None, []), [*outside, kind], [])
    for node in (around, kind):
        if "type_params" in node._fields:  # from Python 3.12 on
            setattr(node, "type_params", [])  # noqa: B010
    module = ast.fix_missing_locations(ast.Module([around], []))
    return compile(module, function.__code__.co_filename, "exec", dont_inherit=True)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _with_outcomes(code: CodeType, outcomes: Mapping[str, Any]) -> CodeType:
    """Code in which the objects that tell outcomes take the place of the marks."""

    def put(constant: Any) -> Any:
        if isinstance(constant, CodeType):
            return _with_outcomes(constant, outcomes)
        return outcomes.get(constant, constant) if isinstance(constant, str) else constant

    return code.replace(co_consts=tuple(map(put, code.co_consts)))


__all__ = ["Forced", "forced"]
