"""Chains of layers that the user prunes with functions of their own."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from secateur.ao.errors import SparsifierError, SparsifierRuntimeError
from secateur.ao.parametrization import FakeStructuredSparsity, module_contains_param

Patterns = Mapping[tuple[Any, ...], Callable[..., None]]


def apply_patterns(model: nn.Module, patterns: Patterns) -> None:
    """Call each pattern's function on every chain that it matches and whose first layer has masked rows.

    A pattern is a tuple of module types, functions, names ("output" for the model's output) or torch's
    MatchAllNode. The function gets the modules and functions of the chain, in order.
    """
    if not patterns:
        return
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception as error:
        raise SparsifierRuntimeError(
            f"prune: patterns are found by torch.fx, which cannot trace {type(model).__name__} ({error}); "
            "make it traceable, or leave the patterns out"
        ) from error
    modules = dict(model.named_modules())
    for node in graph.nodes:
        for pattern, function in patterns.items():
            chain = _match(modules, pattern if isinstance(pattern, tuple) else (pattern,), node)
            first = modules.get(str(chain[0].target)) if chain else None
            if chain and first is not None and module_contains_param(first, FakeStructuredSparsity):
                called = (each for each in chain if each.op.startswith("call_"))
                _call(function, [modules[str(e.target)] if e.op == "call_module" else e.target for e in called])


def _call(function: Callable[..., None], members: list[Any]) -> None:
    try:
        function(*members)
    except SparsifierError:
        raise
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise SparsifierRuntimeError(f"prune: the pattern function {name} failed: {error}") from error


def _match(modules: Mapping[str, nn.Module], pattern: tuple[Any, ...], node: fx.Node) -> list[fx.Node] | None:
    """The nodes of a chain from `node` on that match, the first such chain; None where there is none."""
    first, *rest = pattern
    if not _fits(modules, first, node):
        return None
    if not rest:
        return [node]
    chains = (_match(modules, tuple(rest), user) for user in node.users)
    return next(([node, *chain] for chain in chains if chain), None)


def _fits(modules: Mapping[str, nn.Module], wanted: Any, node: fx.Node) -> bool:
    if isinstance(wanted, type):
        if wanted.__name__ == "MatchAllNode":
            return True
        if issubclass(wanted, nn.Module):
            return node.op == "call_module" and type_before_parametrizations(modules[str(node.target)]) is wanted
    if callable(wanted):
        return node.op == "call_function" and node.target is wanted
    return isinstance(wanted, str) and node.target == wanted
