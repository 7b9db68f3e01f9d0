"""Which methods do nothing but compute, by their source: those may be called to see what they do, no others.

A method that writes a file, logs, or talks to other processes has effects outside of the model, which a twin does not
keep apart. So every call in it must be known to compute: one of a layer, of a tensor, of a function of torch, or of
another such method. What is not known counts as doing more.
"""

from __future__ import annotations

import ast
import builtins
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from secateur.state.leftovers import of_ours
from secateur.tracing.stated import methods_of, named, named_function, own_name, parsed

_LIBRARIES = frozenset(("torch", "math", "numpy", "einops"))  # whose functions compute, but for these
_ACTS = re.compile(
    "backward|load|manual_seed|save|seed|set_.*|tofile|dumps?|share_memory_|register_.*|requires_grad_|distributed|hub|"
    "io|jit|multiprocessing|onnx|utils"
)
_PURE = frozenset(
    (
        *("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "getattr", "int", "isinstance"),
        *("len", "list", "max", "min", "range", "reversed", "round", "sorted", "str", "sum", "super", "tuple", "zip"),
    )
)
_OF_LISTS = frozenset(("append", "extend", "get", "insert", "items", "keys", "pop", "values"))  # of a variable's own


def computes_in(model: nn.Module, function: types.FunctionType, block: Sequence[ast.AST]) -> bool:
    """Whether part of a function does nothing but compute, whichever module it may be a method of."""
    kinds = {type(module): module for module in model.modules()}
    owner = next((module for kind, module in kinds.items() if function in methods_of(kind).values()), None)
    purity = Purity(model, {}) if owner is None else Purity(owner, methods_of(type(owner)))
    does_more = (isinstance(node, ast.Import | ast.ImportFrom) for part in block for node in ast.walk(part))
    return not any(does_more) and purity.harmless(function, block, own=owner is not None)


@dataclass
class Purity:
    """Tells which methods of a module do nothing but compute."""

    module: nn.Module
    methods: Mapping[str, types.FunctionType]
    _asked: set[types.FunctionType] = field(default_factory=set)

    def computes(self, name: str) -> bool:
        """Whether every call in a method is one of a layer, of a tensor, or of a function that computes."""
        return self._does(self.methods.get(name), own=True)

    def _does(self, function: Any, own: bool) -> bool:
        """The same of any function; `own`: a method, whose first argument is the module."""
        if not isinstance(function, types.FunctionType) or (tree := parsed(function)) is None:
            return False
        if function in self._asked:
            return True
        self._asked.add(function)
        return self.harmless(function, [tree], own)

    def harmless(self, function: types.FunctionType, block: Sequence[ast.AST], own: bool) -> bool:
        """The same of part of a function."""
        tree = parsed(function)
        if tree is None:
            return False
        me = tree.args.args[0].arg if own else ""
        calls = (node.func for part in block for node in ast.walk(part) if isinstance(node, ast.Call))
        layers = self._layers_in_turn(tree, me, function) if own else set[str]()
        return all(ast.unparse(c) in layers or self._harmless(c, me, function) for c in calls)

    def _layers_in_turn(self, tree: ast.AST, me: str, function: types.FunctionType) -> set[str]:
        """The variables of loops that go through layers: `for layer in (self.a, self.b)`."""
        found = set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.For | ast.comprehension):
                inside = [*ast.walk(node.iter)]
                own = [each for each in inside if own_name(each, me)]
                others = (e.id for e in inside if isinstance(e, ast.Name) and e.id not in _PURE)
                if (
                    own
                    and all(self._is_layer(each, me) for each in own)
                    and all(named(function, other) is None for other in others)
                ):
                    found |= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        return found

    def _harmless(self, called: ast.expr, me: str, function: types.FunctionType) -> bool:
        if isinstance(called, ast.Subscript):  # self.layers[0](x)
            return self._is_layer(called.value, me)
        found = named_function(called, function, me, type(self.module) if me else object)
        if isinstance(called, ast.Name):
            raised = isinstance(getattr(builtins, called.id, None), type) and called.id.endswith("Error")
            return called.id in _PURE or raised or _computes(named(function, called.id), called.id) or self._user(found)
        if not isinstance(called, ast.Attribute) or _ACTS.fullmatch(called.attr):
            return False
        text = ast.unparse(called)
        if (root := named(function, text.partition(".")[0])) is not None:  # torch.cat, F.relu
            return _computes(root, text) or self._user(found)
        if isinstance(called.value, ast.Name) and called.attr in _OF_LISTS:
            return True
        if isinstance(called.value, ast.Name) and called.value.id == me and called.attr in self.methods:
            return self.computes(called.attr)
        return self._user(found) or self._is_layer(called, me) or hasattr(Tensor, called.attr)

    def _user(self, function: types.FunctionType | None) -> bool:
        """The same of a function that some code calls; a method of the module's has it as its first argument."""
        if function is None or of_ours(function.__module__):
            return False
        return self._does(function, own=function in self.methods.values())

    def _is_layer(self, node: ast.AST, me: str) -> bool:
        owner, _, path = ast.unparse(node).partition(".")
        try:
            return owner == me and bool(path) and isinstance(self.module.get_submodule(path), nn.Module)
        except AttributeError:
            return False


def _computes(thing: object, text: str) -> bool:
    """Whether something that code calls, or takes what it calls from, is of a library that computes."""
    home = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None) or ""
    if text.rpartition(".")[2] == "checkpoint" and home.startswith("torch"):
        return True
    parts = (*home.split("."), *text.split("."))
    return parts[0] in _LIBRARIES and not any(map(_ACTS.fullmatch, parts))


__all__ = ["Purity", "computes_in"]
