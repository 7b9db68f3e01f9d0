"""Run a model on stand-ins for its tensors, in high precision, leaving it as it is."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from secateur.compat import OpOverload, TorchDispatchMode, draws, schema, shared, storage_id, tree_map, without_modes
from secateur.ops.record import part
from secateur.state.chances import same_chances, seed
from secateur.state.held import Place
from secateur.state.patches import SLOW_ATTENTION, patched
from secateur.state.twin import run_apart
from secateur.tracing.environment import gradients, uncached
from secateur.tracing.examples import arguments, device_of, handed_out, mapped, tensors_in


def raised(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in a floating dtype of at least the given precision; others are copied as they are."""
    if tensor.is_complex():
        return tensor.detach().to(torch.complex128 if dtype == torch.float64 else tensor.dtype, copy=True)
    return tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


_HELD = 2**30  # bytes of stand-ins for parameters at a time; where it takes more, one is made when it is read

Values = Callable[[str], Tensor]
Within = Callable[[nn.Module], AbstractContextManager[Any]]


def outputs(
    model: nn.Module,
    example: Any,
    dtype: torch.dtype,
    change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
    within: Within = lambda _: nullcontext(),
    seen: Callable[[str, Any], None] | None = None,
    values: Values | None = None,
) -> list[Tensor]:
    """The tensors that a model puts out in eval mode, with `change(name, copy)` in the place of each of its own.

    `values` gives the values of parameters that have none here.
    """
    late = values is not None or sum(parameter.numel() for parameter in model.parameters()) * 8 > _HELD

    def start() -> _Precise:
        return _Precise(
            example, dtype, change, within, seen, _Late(device_of(example), dtype, change, values) if late else None
        )

    return run_apart(model, start)


def _high(item: Any) -> Any:
    """A tensor or a kind of number in high precision, where the model's code asks for a lower one."""
    if isinstance(item, torch.dtype):
        return torch.complex128 if item.is_complex else torch.float64 if item.is_floating_point else item
    lower = isinstance(item, Tensor) and item.dtype != _high(item.dtype)
    return item.to(_high(item.dtype)) if lower else item


def _all_high(item: Any) -> Any:
    return tree_map(_high, item) if isinstance(item, tuple | list | dict) else _high(item)


def _written(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an op writes into."""
    if not isinstance(op, OpOverload) or not schema(op).is_mutable:
        return []
    given = {a.name: value for a, value in zip(schema(op).arguments, args, strict=False)} | kwargs
    return [given.get(a.name) for a in schema(op).arguments if a.alias_info is not None and a.alias_info.is_write]


class _Late(TorchDispatchMode):
    """Parameters that take no memory, until an op reads one: it gets the stand-in, which is then gone."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        change: Callable[[str, Tensor], Tensor],
        values: Values | None,
    ) -> None:
        super().__init__()
        self._device = device  # of parameters that have no values here
        self._dtype, self._changed, self._values = dtype, change, values
        self._places: dict[int, Tensor] = {}  # by the identity of a parameter: what is in its place
        self._known: dict[int, tuple[Tensor, list[str]]] = {}  # by the memory of that: the parameter, its names
        self._last: tuple[int, Tensor] | None = None  # the memory of what is in a parameter's place, and the stand-in

    def place(self, parameter: Tensor, name: str) -> Tensor:
        """What takes the place of a parameter in a model, under each of its names: of its shape, but one number."""
        if id(parameter) not in self._places:
            device = self._device if parameter.is_meta else parameter.device
            one = raised(torch.zeros((), dtype=parameter.dtype, device=device), self._dtype)
            self._places[id(parameter)] = one.expand(parameter.shape)
            self._known[storage_id(one)] = parameter, []
        found = self._places[id(parameter)]
        self._known[storage_id(found)][1].append(name)
        return found

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(self._knows, _written(func, args, kwargs))):
            raise RuntimeError("it writes into a parameter, and there is no room for a copy of all of them")
        args, kwargs = tree_map(lambda item: self._stand_in(item) if self._knows(item) else item, (args, kwargs))
        return func(*args, **kwargs)

    def _knows(self, item: Any) -> bool:
        return isinstance(item, Tensor) and item.layout is torch.strided and storage_id(item) in self._known

    def _stand_in(self, item: Tensor) -> Tensor:
        """The parameter in high precision; all that are views of it are made of this."""
        if self._last is None or self._last[0] != storage_id(item):
            self._last = None  # before the next is made
            parameter, names = self._known[storage_id(item)]
            with without_modes():
                made = raised(parameter if self._values is None else self._values(names[0]), self._dtype)
                made = made.to(item.device)
                for name in names:
                    made = self._changed(name, made)
            self._last = storage_id(item), made
        return self._last[1]


class _Precise(TorchDispatchMode):
    """A run on copies in high precision, in which ops keep it where the model's own code casts down."""

    def __init__(
        self,
        example: Any,
        dtype: torch.dtype,
        change: Callable[[str, Tensor], Tensor],
        within: Within,
        seen: Any,
        late: _Late | None,
    ) -> None:
        super().__init__()
        self.strayed = False
        self._late = late
        self._example, self._dtype, self._changed, self._within, self._seen = example, dtype, change, within, seen
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # the model's tensor and its stand-in
        self._memory: set[int] = set()
        self._itemsize = 0  # of the model's own numbers
        self._draws = 0

    def carry_out(self, model: nn.Module) -> list[Tensor]:
        """The tensors that the model puts out."""
        for name, module in model.named_modules():
            module.__dict__["training"] = False
            if self._seen is not None:
                module.register_forward_hook(lambda _m, _i, out, name=name: self._seen(name, out))
        args, kwargs = arguments(mapped(self._example, lambda tensor: raised(tensor, self._dtype)))
        late = nullcontext() if self._late is None else self._late
        with (
            patched(SLOW_ATTENTION, *uncached(model)),
            same_chances(),
            gradients(model),
            self,
            self._within(model),
            late,
        ):
            seed(0)
            return [tensor.detach() for tensor in tensors_in(handed_out(model, model(*args, **kwargs)))]

    def change(self, value: Any, place: Place, kind: str) -> Any:
        """The copy of a tensor, as it should be."""
        if not isinstance(value, Tensor) or (kind == "attribute" and id(value) in self._made):
            return self._made[id(value)][1] if isinstance(value, Tensor) else value
        if self._late is not None and (value.is_meta or (kind == "parameter" and value.layout is torch.strided)):
            self._note(value)
            self._made[id(value)] = value, self._late.place(value, str(place))
            return self._made[id(value)][1]
        if id(value) not in self._made:
            self._made[id(value)] = value, raised(value, self._dtype)
            self._note(value)
        with torch.no_grad():
            changed = self._changed(str(place), self._made[id(value)][1])
        self._made[id(value)] = value, changed.requires_grad_(value.requires_grad)
        return changed

    def _note(self, value: Tensor) -> None:
        """A tensor of the model's own, which a run must not see."""
        self._itemsize = self._itemsize or (value.element_size() if value.is_floating_point() else 0)
        self._memory.update([storage_id(value)] if value.layout is torch.strided else ())

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (t for a in args for t in (a if isinstance(a, list | tuple) else (a,)) if isinstance(t, Tensor))
        self.strayed = self.strayed or any(t.layout is torch.strided and storage_id(t) in self._memory for t in given)
        if self._dtype != torch.float64 or not isinstance(func, OpOverload):
            return self._run(func, args, kwargs)
        own = shared(func)
        args = tuple(a if i in own else _all_high(a) for i, a in enumerate(args))
        out = self._run(func, args, {k: a if k in own else _all_high(a) for k, a in kwargs.items()})
        return out if own else _all_high(out)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op makes; numbers that it draws are the same in a model of another width."""
        precise = part(func, "precise")
        if precise is not None and args[0].dtype == torch.float64:
            return precise(self._itemsize or 4, *args, **kwargs)
        if not isinstance(func, OpOverload) or not draws(func):
            return func(*args, **kwargs)
        self._draws += 1
        return drawn(func, args, kwargs, self._draws)


def drawn(op: Any, args: Any, kwargs: Any, number: int) -> Any:
    """What an op draws, in the same way at any size: once for all positions, or as expected."""
    seed(number)
    kwargs = {name: None if name == "generator" else item for name, item in kwargs.items()}
    settled = part(op, "settled")
    return op(*args, **kwargs) if settled is None else settled(op, *args, **kwargs)
