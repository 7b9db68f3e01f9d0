"""Tensors that follow others of the same model: those of a teacher, of a target network, of a moving average.

    for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
        slow.mul_(0.99).add_(fast, alpha=0.01)

is mostly code that no run reaches, as the training loop calls it. If the two were cut at other positions, it would mix
them up. So modules of one form are cut alike where the source makes one of the other or goes through both, and where
one of two beside each other is frozen; so is a buffer that no run used with the parameter that it is named after.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import combinations

from torch import nn

from secateur.axes import unify
from secateur.tracing.capture import Capture
from secateur.tracing.stated import assigned, functions_of, is_torchs, own_name, parsed, words
from secateur.tracing.unreached import form

_TENSORS = frozenset(("parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "load_state_dict"))
_CALLED = ("deepcopy", "zip", "load_state_dict")


def tie_followers(model: nn.Module, capture: Capture) -> None:
    """Make one of the dimensions of tensors that follow each other."""
    for one, other in _pairs(model, capture):
        mine, theirs = capture.values[one], capture.values[other]
        for dim, its in zip(mine.dims, theirs.dims, strict=True):
            unify(dim, its)
        mine.used = theirs.used = mine.used or theirs.used


def _pairs(model: nn.Module, capture: Capture) -> Iterator[tuple[str, str]]:
    """The names of tensors of which one follows the other."""
    found: dict[type[nn.Module], list[tuple[str, str]]] = {}
    for owner, module in model.named_modules():
        kind, start = type(module), f"{owner}." if owner else ""
        if is_torchs(kind):
            continue
        if kind not in found:
            found[kind] = list(_read_together(kind))
        parts = {name: part for name, part in module.named_children() if any(True for _ in part.parameters())}
        learning = {name: any(p.requires_grad for p in part.parameters()) for name, part in parts.items()}
        mixed = combinations(parts, 2) if len({*learning.values()}) == 2 else ()
        asked = [*found[kind], *(pair for pair in mixed if learning[pair[0]] != learning[pair[1]])]
        for one, other in dict.fromkeys(pair for pair in asked if {*pair} <= parts.keys()):
            if parts[one] is not parts[other] and form(parts[one]) == form(parts[other]):
                for name, _ in (*parts[one].named_parameters(), *parts[one].named_buffers()):
                    pair = f"{start}{one}.{name}", f"{start}{other}.{name}"
                    if all(each in capture.values for each in pair):
                        yield pair
        for name, buffer in module.named_buffers(recurse=False):
            if start + name in capture.values and not capture.values[start + name].used:
                fits = {n: _alike(name, n) for n, p in module.named_parameters() if p.shape == buffer.shape}
                best = [n for n, common in fits.items() if common and common == max(fits.values())]
                if len(best) == 1 and start + best[0] in capture.values:
                    yield start + name, start + best[0]


def _alike(buffer: str, parameter: str) -> int:
    """How many parts of a parameter's name a buffer's has, before or behind something else: all, or two at least.

    >>> _alike("ema_0_weight", "net.0.weight"), _alike("weight_old", "weight"), _alike("some_weight", "net.0.weight")
    (2, 1, 0)
    """
    parts = parameter.split(".")
    for first in range(max(len(parts) - 1, 1)):
        own = "_".join(parts[first:])
        if buffer.endswith(f"_{own}") or buffer.startswith(f"{own}_"):
            return len(parts) - first
    return 0


def _read_together(kind: type[nn.Module]) -> Iterator[tuple[str, str]]:
    """The attributes whose tensors code goes through together, or of which one is made as a copy of the other."""
    for function in (f for base in kind.__mro__ if not is_torchs(base) for f in functions_of(base)):
        copies = any(word.endswith(_CALLED) for word in words(function.__code__))
        if not copies or (tree := parsed(function)) is None:
            continue
        me = tree.args.args[0].arg
        for to, value in assigned(tree):
            if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("deepcopy") and value.args:
                yield own_name(to, me), own_name(value.args[0], me)
        for node in ast.walk(tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "zip" or called.endswith(".load_state_dict"):
                read = (a for a in ast.walk(node) if isinstance(a, ast.Attribute) and a.attr in _TENSORS)
                yield from combinations(dict.fromkeys(own_name(a.value, me) for a in read), 2)


__all__ = ["tie_followers"]
