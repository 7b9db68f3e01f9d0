"""Run a model on stand-ins for its tensors, in high precision, leaving it as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.errors import VerifyError
from secateur.surgery import named_tensors
from secateur.trace.capture import arguments, tensors_in, untouched
from secateur.trace.held import Walk

_GROUPED_BYTES = 16


def raised(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in a floating dtype of at least the given precision; others are copied as they are."""
    if tensor.is_complex():
        return tensor.detach().to(torch.complex128 if dtype == torch.float64 else tensor.dtype, copy=True)
    return tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


class HighPrecision(TorchDispatchMode):
    """Keeps doubles double where a model's own code casts them down for speed; `itemsize` is of its own numbers."""

    def __init__(self, itemsize: int = 4) -> None:
        super().__init__()
        self._itemsize = itemsize

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            asked = kwargs.get("dtype")
            if asked is not None and asked.is_floating_point:
                kwargs = {**kwargs, "dtype": torch.float64}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            _check_strides(args[0], args[1], self._itemsize)
            return _grouped_mm(*args, **kwargs)
        return func(*args, **kwargs)


def _check_strides(a: Tensor, b: Tensor, itemsize: int) -> None:
    """Torch's kernel takes rows of whole multiples of 16 bytes only."""
    multiple = _GROUPED_BYTES // itemsize
    for width in (a.shape[-1], b.shape[-1]):
        if width % multiple:
            raise VerifyError(
                "torch's grouped matrix product, which experts run on, takes widths that are multiples of "
                f"{multiple}, and one would be {width}; plan with round_to={multiple}"
            )


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """The rows of each group times its matrix; torch's kernel knows no doubles."""
    ends = offs.tolist()
    rows = [a[start:end] @ b[i] for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*rows, a.new_zeros(a.shape[0] - ends[-1], b.shape[-1])])


def outputs(
    model: nn.Module,
    example: Any,
    dtype: torch.dtype,
    change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
    within: AbstractContextManager[Any] | None = None,
    seen: Callable[[str, Any], None] | None = None,
) -> list[Tensor]:
    """The tensors that a model puts out in eval mode, with `change(name, copy)` in the place of each of its own."""
    with untouched(model), torch.no_grad():
        stand_ins: dict[int, Tensor] = {}
        old = []
        for name, tensor in named_tensors(model):
            if id(tensor) not in stand_ins:
                stand_ins[id(tensor)] = raised(tensor, dtype)
                old.append(tensor)
            stand_ins[id(tensor)] = change(name, stand_ins[id(tensor)])
        for module in model.modules():
            module.__dict__["training"] = False
            for registered in (module._parameters, module._buffers):
                for key, own in registered.items():
                    if own is not None:
                        registered[key] = stand_ins[id(own)]  # type: ignore[assignment]

        def put(value: Any, place: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) not in stand_ins:
                    old.append(value)
                    stand_ins[id(value)] = change(str(place), raised(value, dtype))
                return stand_ins[id(value)]
            return value

        Walk(model).replace(put)
        torch.backends.mha.set_fastpath_enabled(False)
        torch.manual_seed(0)
        args, kwargs = arguments(_lift(example, dtype))
        hooks = list(_watch(model, seen)) if seen is not None else []
        try:
            itemsize = next((p.element_size() for p in old if p.is_floating_point()), 4)
            with HighPrecision(itemsize), within or nullcontext():
                return list(tensors_in(model(*args, **kwargs)))
        finally:
            for hook in hooks:
                hook.remove()


def _watch(model: nn.Module, seen: Callable[[str, Any], None]) -> Iterator[Any]:
    for name, module in model.named_modules():
        yield module.register_forward_hook(lambda _m, _i, out, name=name: seen(name, out))


def _lift(item: Any, dtype: torch.dtype) -> Any:
    if isinstance(item, Tensor):
        return raised(item, dtype)
    if isinstance(item, tuple | list):
        return type(item)(_lift(i, dtype) for i in item)
    if isinstance(item, Mapping):
        return {key: _lift(value, dtype) for key, value in item.items()}
    return item
