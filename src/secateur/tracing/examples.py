"""What a model is called with, and what it puts out: examples, other sizes of them, the tensors inside."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import TraceError

_DEEPEST = 6  # how far inside of objects tensors are looked for
_COARSEST = 32  # the largest step by which the sizes of images and signals are changed
_MOST_TRIES = 5  # other sizes that are tried

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a model, and those by keyword


@dataclass(frozen=True, init=False)
class Examples:
    """Several examples of what a model is called with: what any of them shows, holds.

    >>> import secateur as sec
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.a, self.b, self.end = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)
    ...     def forward(self, x, other=False):
    ...         return self.end(self.b(x) if other else self.a(x))
    >>> x = torch.zeros(1, 4)
    >>> len(sec.trace(Net(), sec.Examples((x,), (x, True))).axes[0].sites)
    5

    Each is a tensor, a tuple of arguments or a dict of keyword arguments. Costs are those of the first.
    """

    runs: tuple[Any, ...]

    def __init__(self, *examples: Any) -> None:
        if not examples:
            raise TraceError("Examples takes at least one example")
        object.__setattr__(self, "runs", examples)


def examples_of(example: Any) -> tuple[Any, ...]:
    """Every example that was given."""
    return example.runs if isinstance(example, Examples) else (example,)


Lists = Callable[[list[Any]], list[Any]]


def arguments(example: Any) -> Inputs:
    """A tensor, a tuple of arguments or a dict of keyword arguments, as (args, kwargs)."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list) and not hasattr(example, "_fields"):
        return tuple(example), {}
    return (example,), {}


def with_numbers(model: nn.Module, example: Any) -> Any:
    """An example with the whole numbers that forward takes by default, so that they can be others."""
    args, kwargs = arguments(example)
    signature = inspect.signature(model.forward)
    numbers = {name: p.default for name, p in signature.parameters.items() if type(p.default) is int}
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:  # hooks may change what forward is called with
        return example
    plain = not any(
        p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()
    )
    return {**numbers, **bound.arguments} if plain and numbers.keys() - bound.arguments.keys() else example


class _Rest(list[Any]):
    """What forward takes as `*args`: as many as there are."""


def with_rest(model: nn.Module, example: Any) -> Any:
    """An example whose arguments for `*args` are a list, so that there can be more of them."""
    kinds = [p.kind for p in inspect.signature(model.forward).parameters.values()]
    args, kwargs = arguments(example)
    if inspect.Parameter.VAR_POSITIONAL not in kinds or kwargs:
        return example
    named = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    return (*args[:named], _Rest(args[named:]))


def with_mask(model: nn.Module, example: Any) -> Any:
    """An example with an attention mask that hides nothing, if forward takes one that was not given.

    Attention with a mask is often other code than attention without. It has all four dimensions (batch, heads, from,
    to), of which models that make one by themselves take over what they are given; one for all that look, as a decoder
    that looks at what it was made for may have another length.
    """
    signature = inspect.signature(model.forward)
    args, kwargs = arguments(example)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # hooks may change what forward is called with
        return example
    words = next(iter(given.values()), None)
    asked = "attention_mask" in signature.parameters and given.get("attention_mask") is None
    if not asked or not isinstance(words, Tensor) or words.ndim < 2 or (words.is_floating_point() and words.ndim != 3):
        return example
    batch, length = words.shape[:2]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    mask = torch.zeros(batch, 1, 1, length, dtype=dtype, device=words.device)
    return {**given, "attention_mask": mask} if set(given) <= by_name(signature) else example


def by_name(signature: inspect.Signature) -> set[str]:
    """The parameters that can be given by name."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return {name for name, p in signature.parameters.items() if p.kind in kinds}


# tensors inside ------------------------------------------------------------------------------------------------


def mapped(
    item: Any, change: Callable[[Any], Any], depth: int = 0, *, ints: bool = False, lists: Lists = lambda parts: parts
) -> Any:
    """An example with another tensor in the place of each, in containers and objects of the same kinds.

    >>> mapped({"x": [torch.ones(1), 2]}, lambda tensor: tensor + 1)
    {'x': [tensor([2.]), 2]}

    With `ints` whole numbers are changed, too; `lists` changes lists when all that is in them is.
    """
    if isinstance(item, Tensor) or (ints and type(item) is int):
        return change(item)

    def inside(part: Any) -> Any:
        return mapped(part, change, depth, ints=ints, lists=lists)

    if isinstance(item, tuple):
        parts = [inside(part) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    if type(item) in (list, _Rest):
        parts = type(item)(inside(part) for part in item)
        return type(item)(lists(parts))
    if type(item) is dict:
        return {key: inside(value) for key, value in item.items()}
    if depth > _DEEPEST or not _holds_tensors(item, depth):
        return item
    return _object(item, change, depth, lists)


def _object(item: Any, change: Callable[[Tensor], Any], depth: int, lists: Lists) -> Any:
    """A shallow copy of an object, with what it holds changed: its entries, its attributes, or both as one."""
    new = copy.copy(item)
    made: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if id(value) not in made:
            made[id(value)] = mapped(value, change, depth + 1, lists=lists)
        return made[id(value)]

    if isinstance(item, Mapping):
        for key, value in item.items():
            new[key] = once(value)
    elif isinstance(item, list):
        new[:] = [once(value) for value in item]
    for name, value in vars(item).items() if hasattr(item, "__dict__") else ():
        vars(new)[name] = once(value)
    return new


def _holds_tensors(item: Any, depth: int) -> bool:
    return not isinstance(item, nn.Module | type) and any(True for _ in tensors_in(item, depth))


def tensors_in(output: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor of what a model returns or is given: in tuples, lists, mappings, dataclasses and other objects."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value, depth)
    elif isinstance(output, tuple | list | set):
        for value in output:
            yield from tensors_in(value, depth)
    elif depth < _DEEPEST and not isinstance(output, nn.Module | type):
        for value in getattr(output, "__dict__", {}).values():
            yield from tensors_in(value, depth + 1)


def device_of(example: Any) -> torch.device:
    """Where the tensors of an example are, so that those of a model without values can be thought to be there."""
    return next((tensor.device for tensor in tensors_in(example) if not tensor.is_meta), torch.device("cpu"))


def placed_with(model: nn.Module, example: Any) -> Any:
    """An example on the device of a model; as it is where the model is on several, or has no values."""
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    if len(devices) != 1 or all(tensor.is_meta or tensor.device in devices for tensor in tensors_in(example)):
        return example
    (device,) = devices
    return mapped(example, lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def handed_out(model: nn.Module, output: Any) -> Any:
    """What a model returns, without objects that it takes back: a cache, returned under the name of an argument."""
    taken = inspect.signature(model.forward).parameters
    if isinstance(output, Mapping):
        return {key: value for key, value in output.items() if key not in taken or not _is_object(value)}
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        named = {each.name: getattr(output, each.name) for each in dataclasses.fields(output)}
        return handed_out(model, named)
    return output


def _is_object(value: Any) -> bool:
    return not isinstance(value, Tensor | tuple | list | set | Mapping)


# other sizes ---------------------------------------------------------------------------------------------------

# Numbers of tensors and their dimensions; below 0, whole numbers (dimension 0) and lists (dimension 1) beside them.
Dims = frozenset[tuple[int, int]]


def sizes_to_change(example: Any, tied: Dims) -> list[Dims]:
    """Dimensions of an example's tensors, and numbers, that other inputs may have larger.

    Best first: all, all but some, the batch. Those of one size belong together; `tied` ones are those of some weight.
    """
    tensors, numbers, lists = _leaves(example)
    batch = next((tensor.shape[0] for tensor in tensors if tensor.ndim), 0)
    groups: dict[Any, set[tuple[int, int]]] = {}
    for number, _ in enumerate(numbers):
        groups.setdefault("numbers", set()).add((-1 - number, 0))
    for number, parts in enumerate(lists):
        if parts:
            together = len(parts) == batch and not isinstance(parts, _Rest)
            groups.setdefault("batch" if together else "lists", set()).add((-1 - number, 1))
    for number, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape if tensor.layout is torch.strided else ()):
            key = "batch" if dim == 0 and size == batch else size
            if size:
                groups.setdefault(key, set()).add((number, dim))
    free = {key: frozenset(dims) for key, dims in groups.items() if not dims & tied}
    every = frozenset(place for dims in free.values() for place in dims)
    but_one = [every - dims for key, dims in sorted(free.items(), key=lambda item: item[0] == "batch")]
    tries = [every, *but_one[:3], *(dims for key, dims in free.items() if key == "batch"), *free.values()]
    return [dims for dims in dict.fromkeys(tries) if dims][:_MOST_TRIES]


def resized(example: Any, dims: Dims, times: int) -> Any:
    """An example that is longer in some dimensions, by some steps; its contents are repeated."""
    tensors, numbers, lists = count(), count(-1, -1), count(-1, -1)

    def longer(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item + times if (next(numbers), 0) in dims else item
        number = next(tensors)
        for dim in range(item.ndim):
            if (number, dim) in dims:
                item, size, more = item.detach(), item.shape[dim], times * _step(item, dim)
                again = [item.narrow(dim, 0, min(size, more - done)) for done in range(0, more, size)]
                item = torch.cat([item, *again], dim).contiguous()
        return item

    def lengthened(parts: list[Any]) -> list[Any]:
        more = times if (next(lists), 1) in dims else 0
        return [*parts, *(parts[i % len(parts)] for i in range(more))]

    made = mapped(_called(example), longer, ints=True, lists=lengthened)
    return (*made[:-1], *made[-1]) if type(made) is tuple and made and isinstance(made[-1], _Rest) else made


def _called(example: Any) -> Any:
    """An example, as a tuple if it is a list of arguments: how many there are is no matter of size."""
    return tuple(example) if type(example) is list else example


def _step(tensor: Tensor, dim: int) -> int:
    """Images and signals are often halved, several times: their lengths keep the powers of two that they have."""
    size = tensor.shape[dim]
    return min(size & -size, _COARSEST) if dim and tensor.is_floating_point() else 1


def _leaves(example: Any) -> tuple[list[Tensor], list[int], list[list[Any]]]:
    """The tensors, the whole numbers and the lists of an example."""
    found: list[Any] = []
    lists: list[list[Any]] = []

    def note(item: Any) -> Any:
        found.append(item)
        return item

    def note_list(parts: list[Any]) -> list[Any]:
        lists.append(parts)
        return parts

    mapped(_called(example), note, ints=True, lists=note_list)
    return [i for i in found if isinstance(i, Tensor)], [i for i in found if not isinstance(i, Tensor)], lists
