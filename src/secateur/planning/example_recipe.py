"""A recipe for an example input: enough to make one like it anywhere, without shipping anybody's data."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_MOST = 2**27  # elements of all tensors of an example together; what asks for more is not an example
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_INT64 = torch.iinfo(torch.int64)


def recipe(item: Any) -> Any:
    """How to make an input like this one; None where it is too large, or not of tensors and plain values."""
    try:
        how = _recipe(item)
        _elements(how)
    except (ValueError, RecursionError):
        return None
    return how


def _recipe(item: Any) -> Any:
    if isinstance(item, Tensor):
        made: dict[str, Any] = {"tensor": list(item.shape), "dtype": str(item.dtype).removeprefix("torch.")}
        if not item.is_floating_point() and not item.is_complex() and item.numel() and not item.is_meta:
            whole = item.long()
            made |= {key: min(int(n), _INT64.max - 1) for key, n in (("low", whole.min()), ("high", whole.max()))}
        return made
    if _plain(item):
        return {"value": item}
    if isinstance(item, Mapping) and all(isinstance(key, str) for key in item):
        return {"dict": {key: _recipe(value) for key, value in item.items()}}
    if isinstance(item, tuple | list):
        return {"tuple" if isinstance(item, tuple) else "list": [_recipe(value) for value in item]}
    raise ValueError(f"no recipe makes a {type(item).__name__}")


def _plain(item: Any) -> bool:
    if isinstance(item, float):
        return math.isfinite(item)
    if isinstance(item, int):
        return _INT64.min <= item <= _INT64.max
    return item is None or isinstance(item, str)


def made(how: Any) -> Any:
    """An input by a recipe, drawn with a fixed seed. Raises ValueError where the recipe is none."""
    _elements(how)
    return _made(how, torch.Generator().manual_seed(0))


def _made(how: Any, generator: torch.Generator) -> Any:
    kind, inner = _opened(how)
    if kind == "tensor":
        return _tensor(how, generator)
    if kind == "dict":
        return {key: _made(value, generator) for key, value in inner.items()}
    if kind == "value":
        return inner
    items = [_made(value, generator) for value in inner]
    return tuple(items) if kind == "tuple" else items


def _opened(how: Any) -> tuple[str, Any]:
    """The kind of a recipe and what it holds, if that is what the kind holds."""
    kinds = {"tensor": list, "dict": dict, "tuple": list, "list": list}
    for kind, holds in kinds.items():
        if isinstance(how, dict) and isinstance(how.get(kind), holds):
            return kind, how[kind]
    if isinstance(how, dict) and "value" in how and _plain(how["value"]):
        return "value", how["value"]
    raise ValueError("an example that cannot be made anew")


def _elements(how: Any) -> int:
    """How many elements a recipe asks for, before any is made; ValueError for one that asks for too many."""
    kind, inner = _opened(how)
    if kind == "value":
        return 0
    if kind == "tensor":
        if not all(type(n) is int and 0 <= n <= _MOST for n in inner) or len(inner) > 64:
            raise ValueError("an example of an impossible shape")
        count = math.prod(inner)
    else:
        count = sum(_elements(value) for value in (inner.values() if kind == "dict" else inner))
    if count > _MOST:
        raise ValueError(f"an example of {count} elements, more than any example has")
    return count


def _tensor(how: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    shape, dtype = how["tensor"], _DTYPES.get(str(how.get("dtype")))
    if dtype is None:
        raise ValueError("an example of an unknown dtype")
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    low, high = how.get("low", 0), how.get("high", 1)
    if type(low) is not int or type(high) is not int or not _INT64.min <= low <= high < _INT64.max:
        raise ValueError("an example of impossible values")
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)
