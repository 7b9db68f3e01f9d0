"""The branches of a function, each with the decisions that lead to it, read off its source.

    if x is None:
        return h
    if self.twice:
        h = self.turn(h) if rest else h

`self.turn(h)` runs where the first test comes out false, the second true, and `rest` too. What follows a branch that
returns is a branch of its own; so are the body of a loop, which may turn not once, what is done after an error, a case
of a `match`, and what stands after `and` and `or`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Extent = tuple[int, int, int, int]  # the first line and column of an expression, and the last
Decisions = tuple[tuple[Extent, bool], ...]  # tests by where they are, and what they come to

_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Way:
    """A branch: what has to hold for it, its code, and every decision on the way there."""

    test: str
    block: Sequence[ast.AST]
    decisions: Decisions


def ways(tree: ast.FunctionDef) -> Iterator[Way]:
    """Those of a function, outer ones before those within.

    >>> code = "def f(x):\\n    if not x: return 0\\n    return g(x) if x.wide else x"
    >>> [(way.test, len(way.decisions)) for way in ways(ast.parse(code).body[0])]
    [('if not x', 1), ('unless not x', 1), ('if x.wide', 2), ('unless x.wide', 2)]
    """
    yield from _through(tree.body, ())


def span(node: ast.expr | ast.pattern | ast.ExceptHandler) -> Extent:
    """Where something is."""
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _through(block: Sequence[ast.stmt], decided: Decisions) -> Iterator[Way]:
    for at, each in enumerate(block):
        if isinstance(each, ast.If | ast.While):
            yield from _either(each, decided)
            ends = [bool(b) and isinstance(b[-1], _ENDS) for b in (each.body, each.orelse)]
            if isinstance(each, ast.If) and any(ends) and not all(ends):
                decided = (*decided, (span(each.test), ends[1]))
                if at + 1 < len(block):
                    yield Way(_told(each.test, ends[1]), block[at + 1 :], decided)
        elif isinstance(each, ast.For | ast.Try | ast.Match):
            yield from _one_of_several(each, decided)
        else:
            yield from _inside(each, () if isinstance(each, _FUNCTIONS) else decided)


def _one_of_several(node: ast.For | ast.Try | ast.Match, decided: Decisions) -> Iterator[Way]:
    """The body of a loop, what is done after an error, the cases of a match; and what is within or beside them."""
    several: list[tuple[str, Extent, list[ast.stmt]]] = []
    if isinstance(node, ast.For):
        several = [(f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}", span(node.iter), node.body)]
        yield from _inside(node.iter, decided)
        yield from _through(node.orelse, decided)
    elif isinstance(node, ast.Match):
        yield from _inside(node.subject, decided)
        about = ast.unparse(node.subject)
        several = [(f"if {about} is {ast.unparse(c.pattern)}", span(c.pattern), c.body) for c in node.cases]
    else:
        yield from _through([*node.body, *node.orelse, *node.finalbody], decided)
        errors = ((ast.unparse(each.type) if each.type else "an error", each) for each in node.handlers)
        several = [(f"after {error}", span(each), each.body) for error, each in errors]
    for told, where, body in several:
        then = (*decided, (where, True))
        yield Way(told, body, then)
        yield from _through(body, then)


def _either(node: ast.If | ast.While | ast.IfExp, decided: Decisions) -> Iterator[Way]:
    """Both branches of a decision, and what is within the test and within each."""
    yield from _inside(node.test, decided)
    for outcome, held in ((True, node.body), (False, node.orelse)):
        block: Sequence[ast.AST] = held if isinstance(held, list) else [held]
        then = (*decided, (span(node.test), outcome))
        if block:
            yield Way(_told(node.test, outcome), block, then)
        if isinstance(held, list):
            yield from _through(held, then)
        elif held is not None:
            yield from _inside(held, then)


def _inside(node: ast.AST, decided: Decisions) -> Iterator[Way]:
    """The branches within a statement that decides nothing itself, or within an expression."""
    if isinstance(node, ast.IfExp):
        yield from _either(node, decided)
        return
    if isinstance(node, ast.BoolOp):
        first, outcome = node.values[0], isinstance(node.op, ast.And)
        yield Way(_told(first, outcome), node.values[1:], (*decided, (span(first), outcome)))
    for _, value in ast.iter_fields(node):
        parts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)]
        statements = [each for each in parts if isinstance(each, ast.stmt)]
        yield from _through(statements, decided)
        for each in parts:
            if not isinstance(each, ast.stmt):
                yield from _inside(each, decided)


def _told(test: ast.expr, outcome: bool) -> str:
    return f"{'if' if outcome else 'unless'} {ast.unparse(test)}"


__all__ = ["Decisions", "Extent", "Way", "span", "ways"]
