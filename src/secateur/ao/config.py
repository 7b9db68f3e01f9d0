"""From what the user writes about a tensor to a checked group with its dotted (fully qualified, "fqn") name."""

import copy
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from secateur.ao.errors import (
    SparsifierAssertionError,
    SparsifierAttributeError,
    SparsifierKeyError,
    SparsifierTypeError,
    SparsifierValueError,
)

Group = dict[str, Any]


def module_to_fqn(model: nn.Module, module: nn.Module, prefix: str = "") -> str | None:
    """
    >>> model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
    >>> module_to_fqn(model, model[1][0])
    '1.0'

    The name of `module` inside `model`: "" for the model itself, None for a stranger.
    A name that is not empty begins with `prefix`.
    """
    for name, candidate in model.named_modules():
        if candidate is module:
            return prefix + name if name else name
    return None


def fqn_to_module(model: nn.Module | None, path: str) -> nn.Module | torch.Tensor | None:
    """
    >>> model = nn.Sequential(nn.Linear(2, 3))
    >>> fqn_to_module(model, "0"), fqn_to_module(model, "0.weight").shape, fqn_to_module(model, "1")
    (Linear(in_features=2, out_features=3, bias=True), torch.Size([3, 2]), None)

    The module or tensor called `path` in `model`, None where there is none.
    """
    found: Any = model
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module | torch.Tensor) else None


def get_arg_info_from_tensor_fqn(model: nn.Module, tensor_fqn: str) -> dict[str, Any]:
    """
    >>> model = nn.Sequential(nn.Linear(2, 3))
    >>> info = get_arg_info_from_tensor_fqn(model, "0.weight")
    >>> info["module"] is model[0], info["module_fqn"], info["tensor_name"], info["tensor_fqn"]
    (True, '0', 'weight', '0.weight')

    The four keys by which a sparsifier's group names a tensor. "module" is None where the model has none so
    called; whether the module has the tensor is not looked at.
    """
    module_fqn, _, tensor_name = tensor_fqn.rpartition(".")
    return {
        "module_fqn": module_fqn,
        "module": fqn_to_module(model, module_fqn),
        "tensor_name": tensor_name,
        "tensor_fqn": tensor_fqn,
    }


def make_groups(model: nn.Module, config: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any]) -> list[Group]:
    """
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> make_groups(model, [{"tensor_fqn": "0.weight"}], {"sparsity_level": 0.5})[0]["sparsity_level"]
    0.5

    One group for each entry: the defaults, overlaid by the entry, and the tensor's name in its four parts.
    """
    groups = [_make_group(model, entry, defaults) for entry in config]
    seen: set[tuple[int, str]] = set()
    for group in groups:
        key = (id(group["module"]), group["tensor_name"])
        if key in seen:
            raise SparsifierAssertionError(f"{group['tensor_fqn']}: named twice in the config; keep one entry")
        seen.add(key)
    return groups


def _make_group(model: nn.Module, entry: Mapping[str, Any], defaults: Mapping[str, Any]) -> Group:
    if not isinstance(entry, Mapping):
        raise SparsifierAssertionError(
            f"config: an entry is a {type(entry).__name__}; pass dicts, such as {{'tensor_fqn': 'layer.weight'}}"
        )
    group: Group = {**copy.deepcopy(dict(defaults)), **entry}
    info = get_arg_info_from_tensor_fqn(model, _tensor_fqn(model, group))
    group["tensor_fqn"] = info["tensor_fqn"]
    for key, value in info.items():
        given = group.get(key, value)
        if given is not value and (isinstance(value, nn.Module) or given != value):
            raise SparsifierAssertionError(
                f"{info['tensor_fqn']}: the config's {key!r} does not agree with it; correct {key!r} or leave it out"
            )
    _check_exists(model, info)
    return group | info


def _tensor_fqn(model: nn.Module, group: Group) -> str:
    fqn = group.get("tensor_fqn")
    if fqn is None and "tensor_name" in group and ("module" in group or "module_fqn" in group):
        owner = group["module_fqn"] if "module_fqn" in group else module_to_fqn(model, group["module"])
        if owner is None:
            raise SparsifierAssertionError("config: an entry's 'module' is not part of the model")
        fqn = f"{owner}.{group['tensor_name']}"
    if not isinstance(fqn, str):
        raise SparsifierAssertionError(
            "config: an entry names no tensor; give 'tensor_fqn' (a string), or 'module' and 'tensor_name'"
        )
    return fqn.removeprefix(".")


def _check_exists(model: nn.Module, info: Group) -> None:
    module, name = info["module"], info["tensor_name"]
    if isinstance(module, nn.Module) and (
        is_parametrized(module, name)
        or module._parameters.get(name) is not None
        or module._buffers.get(name) is not None
    ):
        return
    known = [fqn for fqn, _ in model.named_parameters()]
    near = difflib.get_close_matches(info["tensor_fqn"], known, n=3) or known[:3]
    raise SparsifierAttributeError(
        f"{info['tensor_fqn']}: the model has no such parameter or buffer; use a name from "
        f"model.named_parameters(), for example {', '.join(near) or 'none, since there are none'}"
    )


def sparsity_level(group: Mapping[str, Any], low: float = float("-inf"), high: float = float("inf")) -> float:
    """
    >>> sparsity_level({"tensor_fqn": "layer.weight", "sparsity_level": 0.25})
    0.25

    The group's sparsity level as a float between `low` and `high`.
    """
    where = group.get("tensor_fqn", "sparsifier")
    if "sparsity_level" not in group:
        raise SparsifierKeyError(f"{where}: no 'sparsity_level'; give one in the config or in the defaults")
    given = group["sparsity_level"]
    try:
        if isinstance(given, bool | str | bytes):
            raise TypeError
        level = float(given)
    except (TypeError, ValueError, RuntimeError):
        raise SparsifierTypeError(f"{where}: the sparsity level {given!r} is no number") from None
    if not low <= level <= high:
        expected = "number" if low == float("-inf") else f"number from {low:g} to {high:g}"
        raise SparsifierValueError(f"{where}: the sparsity level is {given!r}; give a {expected}")
    return level
