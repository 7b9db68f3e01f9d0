"""What forward puts in the place of an argument that was left out.

    def forward(self, x, context=None):
        if context is None:
            context = x.new_zeros(len(x), self.width)

A caller who gives a context gives one of that shape. So the variable is read off the source, and looked at when forward
returns: what it holds then is what the argument may be. Where it holds a weight, as learned queries that may be
replaced, a caller is taken to know how wide the model is.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn

from secateur.tracing.stated import is_users, parsed


def stand_ins(model: nn.Module, left_out: Collection[str]) -> dict[str, str]:
    """The arguments of forward that a variable is used for when they are None, and that variable.

    `if a is None: b = …`, `b = … if a is None else a` and `b = a or …`.
    """
    tree = parsed(inspect.unwrap(type(model).forward)) if left_out and is_users(type(model)) else None
    found: dict[str, str] = {}
    for node in ast.walk(tree) if tree is not None else ():
        asked, targets = "", list[ast.expr]()
        if isinstance(node, ast.If):
            asked = _asked(node.test)
            targets = [
                each for one in (*node.body, *node.orelse) if isinstance(one, ast.Assign) for each in one.targets
            ]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
            asked, targets = _asked(node.value.test), node.targets
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BoolOp):
            asked, targets = _name(node.value.values[0]), node.targets
        named = next((_name(target) for target in targets if _name(target)), "")
        if asked in left_out and named:
            found.setdefault(asked, named)
    return found


def _asked(test: ast.expr) -> str:
    """The name of what is compared with None, if that is all that is asked."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot):
        none = test.comparators[0]
        return _name(test.left) if isinstance(none, ast.Constant) and none.value is None else ""
    return ""


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


@contextmanager
def watching(model: nn.Module, variables: Collection[str]) -> Iterator[dict[str, Any]]:
    """What some variables of forward hold when it returns."""
    seen: dict[str, Any] = {}
    if not variables:
        yield seen
        return
    code, before = inspect.unwrap(type(model).forward).__code__, sys.getprofile()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is code:
            seen.update((name, frame.f_locals[name]) for name in variables if name in frame.f_locals)

    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before)


__all__ = ["stand_ins", "watching"]
