"""Code that takes tensors apart, gives them shapes, or makes some whose size is written there: how it looks."""

from __future__ import annotations

import ast
import dis
from collections.abc import Callable, Sequence
from types import CodeType

from secateur.tracing.stated import words

_SHAPING = frozenset(
    (
        *("chunk", "expand", "flip", "fold", "narrow", "pixel_shuffle", "rearrange", "reduce", "repeat", "reshape"),
        *("roll", "split", "tensor_split", "unflatten", "unfold", "view"),
    )
)
_OF_TEXT = frozenset(("expand", "reduce", "repeat", "split"))  # names that other things than tensors have, too
_MAKING = frozenset(
    (
        *("arange", "empty", "eye", "full", "linspace", "new_full", "new_ones", "new_tensor", "new_zeros", "ones"),
        *("rand", "randn", "randperm", "tensor", "zeros"),
    )
)
_STATISTICS = frozenset(("layer_norm", "logsumexp", "mean", "median", "norm", "normalize", "std", "var"))
MIXING = _STATISTICS | {"argsort", "cumprod", "cumsum", "kthvalue", "log_softmax", "softmax", "sort", "topk"}
_SLICING = frozenset(dis.opmap[name] for name in ("BUILD_SLICE", "BINARY_SLICE", "STORE_SLICE") if name in dis.opmap)


def shapes_itself(node: ast.AST, surely: bool) -> bool:
    """Whether a part of some code does so by itself; `surely`: whatever runs there, it meets a tensor."""
    if isinstance(node, ast.Call):
        return _gives_shape(node, surely)
    if isinstance(node, ast.Compare):
        return surely and _states_size(node)
    return isinstance(node, ast.Subscript if surely else ast.Slice) and _apart(node)


def touches(block: Sequence[ast.AST], statistics: bool) -> bool:
    """Whether some code mixes the positions of a dimension, with `statistics` or without, or takes some of them out."""
    mixing = MIXING if statistics else MIXING - _STATISTICS
    for each in (inner for part in block for inner in ast.walk(part)):
        if isinstance(each, ast.Call) and getattr(each.func, "attr", getattr(each.func, "id", "")) in mixing:
            return True
        if isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Tuple):
            return True
    return False


def picking(tree: ast.AST) -> Callable[[Sequence[ast.AST]], bool]:
    """Tells branches of a function that do nothing but pick what tensors are then taken apart by.

    >>> picks = picking(ast.parse("n = 4 if long else 2; h = h.roll(n, 1 if long else 0); k = 3 if long else 1"))
    >>> [picks([ast.parse(text).body[0]]) for text in ("n = 4", "k = 3")]
    [True, False]
    """
    given = [part for node in ast.walk(tree) if shapes_itself(node, False) for part in _given(node)]
    names = {each.id for part in given for each in ast.walk(part) if isinstance(each, ast.Name)}
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and _assigns(node, names)]
    inside = {id(each) for part in (*given, *values) for each in ast.walk(part)}

    def picks(block: Sequence[ast.AST]) -> bool:
        plain = not any(isinstance(each, ast.Call | ast.Subscript) for part in block for each in ast.walk(part))
        return plain and all(id(part) in inside or _assigns(part, names) for part in block)

    return picks


def _given(node: ast.AST) -> list[ast.expr]:
    """What a call or a slice is given."""
    if isinstance(node, ast.Call):
        return [*node.args, *(keyword.value for keyword in node.keywords)]
    return [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]


def _assigns(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Assign) and all(isinstance(to, ast.Name) and to.id in names for to in node.targets)


def may_shape_itself(code: CodeType) -> bool:
    """What tells, without the source, that code does not take tensors apart, but for what it calls."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    sliced = not _SLICING.isdisjoint(code.co_code[::2]) or any(type(one) is slice for one in code.co_consts)
    return sliced or not (_SHAPING | _MAKING).isdisjoint(words(code)) or any(map(may_shape_itself, inner))


def _apart(node: ast.AST) -> bool:
    """Whether a slice, or one among several indices, begins or ends more than a step from either end."""
    if isinstance(node, ast.Subscript):
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        return any(isinstance(each, ast.Slice) and _apart(each) for each in indices)
    return isinstance(node, ast.Slice) and any(map(_far, (node.lower, node.upper, node.step)))


def _far(bound: ast.expr | None) -> bool:
    text = ast.unparse(bound) if bound is not None else "0"
    return text not in ("0", "1", "-1")


def _gives_shape(call: ast.Call, surely: bool) -> bool:
    """Whether a call takes a tensor apart, gives it a shape, or makes one whose size is written there."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in _MAKING:
        parts = [part for given in call.args for part in ast.walk(given)]
        return any(isinstance(p, ast.List) or (isinstance(p, ast.Constant) and _several(p.value)) for p in parts)
    return name in (_SHAPING - _OF_TEXT if surely else _SHAPING)


def _states_size(test: ast.Compare) -> bool:
    """Whether a size is compared with a number that is written there."""
    sizes = any(".shape[" in text or ".size(" in text for text in map(ast.unparse, (test.left, *test.comparators)))
    return sizes and any(isinstance(e, ast.Constant) and _several(e.value) for e in (test.left, *test.comparators))


def _several(value: object) -> bool:
    return type(value) is int and value > 1


__all__ = ["MIXING", "may_shape_itself", "picking", "shapes_itself", "touches"]
