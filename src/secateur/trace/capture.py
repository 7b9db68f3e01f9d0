"""Run a model once, on fake tensors, and record what its ops do to axes."""

from __future__ import annotations

import dataclasses
import random
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, redispatch_function
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.axes import Atom, fix
from secateur.errors import TraceError
from secateur.nn.attention import multi_head_attention_forward
from secateur.trace import registry
from secateur.trace import rules as rules  # registers them
from secateur.trace import signatures as signatures  # registers them
from secateur.trace.environment import laid_open
from secateur.trace.environment import unscripted as unscripted  # for verify
from secateur.trace.held import Snapshot, Walk
from secateur.trace.readable import readable
from secateur.trace.sizes import Attr, Dim, Expr, Op, Place, Size, plain
from secateur.trace.tracer import Tracer, tensors_among
from secateur.trace.value import Value

_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
_COUNTS = {Tensor.numel, Tensor.nelement, torch.numel}
# Layers whose own code does not read these attributes: torch's others compare or compute with them.
_PLAIN = (nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.Embedding)
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class OpRecorder(TorchDispatchMode):
    """Sees every ATen op."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.suspended = False
        self.seen = False  # whether the torch function that leads to the present ops, with its sizes, was seen

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        watched = not self.suspended and isinstance(func, torch._ops.OpOverload)
        if watched and func.namespace == "aten" and registry.rule_for(func) is None:
            # In inference mode, composed ops arrive whole.
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor):
            out = args[0].new_empty(args[0].shape[0], args[1].shape[-1])  # its fake kernel knows one dtype only
        else:
            out = func(*args, **kwargs)
        if watched:
            self.tracer.record(func, args, kwargs, out, seen=self.seen)
        return out


class FunctionRecorder(TorchFunctionMode):
    """Sees every torch function, with the sizes that it was called with still knowing where they came from."""

    def __init__(self, tracer: Tracer, ops: OpRecorder) -> None:
        super().__init__()
        self.tracer = tracer
        self.ops = ops
        self.inside: list[Any] = []

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _SHAPE:
            return self.tracer.shape_of(args[0], func(*args))
        if func is Tensor.size:
            return self._size(*args, **kwargs)
        if func is Tensor.__len__:
            self._count_as_value(args[0])
        if func in _READS:
            self._read_out(func, args[0])
        whole = registry.function_rule_for(func)
        if whole is not None:
            return self._as_a_whole(whole, func, args, kwargs)
        signature = registry.sizes_for(func)
        if signature is None and isinstance(func, types.FunctionType) and func not in self.inside:
            self.inside.append(func)
            try:
                with self:
                    return redispatch_function(func, kinds, args, kwargs)
            finally:
                self.inside.pop()
        self.ops.seen = not any(map(is_functorch_wrapped_tensor, tensors_among((args, kwargs))))
        try:
            out = func(*args, **kwargs)
        finally:
            self.ops.seen = False
        if signature is not None:
            signature(self.tracer, out, *args, **kwargs)
        elif func in _COUNTS:
            return self._numel(args[0], out)
        else:
            self._loose_sizes(func, (args, kwargs))
        self.tracer.account(getattr(func, "__name__", str(func)), (args, kwargs))
        return out

    def _count_as_value(self, x: Tensor) -> None:
        """`len` answers with a plain int, which will not tell what it is used for."""
        value = self.tracer.known(x)
        if value is not None and value.dims:
            self.tracer.on_value(Dim(value.dims[0]), "len()")

    def _read_out(self, func: Any, x: Tensor) -> None:
        value = self.tracer.known(x)
        for dim in value.dims if value is not None else ():
            fix(dim, f"{func.__name__}: its elements leave torch ({self.tracer.where()})")

    def _size(self, x: Tensor, dim: int | None = None) -> Any:
        shape = self.tracer.shape_of(x, x.shape)
        return shape if dim is None else shape[dim]

    def _numel(self, x: Tensor, count: int) -> int:
        value = self.tracer.known(x)
        if value is None or not value.dims:
            return count
        expr: Any = Dim(value.dims[0])
        for dim in value.dims[1:]:
            expr = Op("*", expr, Dim(dim))
        return Size(count, expr, self.tracer)

    def _as_a_whole(self, rule: Any, func: Any, args: Any, kwargs: Any) -> Any:
        self.ops.suspended = True
        try:
            out = func(*args, **kwargs)
        finally:
            self.ops.suspended = False
        self.tracer.ops += 1
        self.tracer.run_function_rule(rule, func, args, kwargs, out)
        return out

    def _loose_sizes(self, func: Any, given: Any) -> None:
        """A size that arrives where no size is expected is a number like any other."""
        if isinstance(given, Size):
            self.tracer.on_value(given.expr, getattr(func, "__name__", str(func)))
        elif isinstance(given, tuple | list):
            for item in given:
                self._loose_sizes(func, item)
        elif isinstance(given, dict):
            for item in given.values():
                self._loose_sizes(func, item)


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a tuple of arguments or a dict of keyword arguments, as (args, kwargs)."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    return (example,), {}


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Every tensor of a model's output: in tuples, lists, mappings, dataclasses, and held directly by other objects.

    What those hold deeper down (the layers of a cache) is state, not output.
    """
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, tuple | list | set):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))
    else:
        yield from (value for value in getattr(output, "__dict__", {}).values() if isinstance(value, Tensor))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, the model's modules, the random state and torch's switches are as before after it."""
    snapshot = Snapshot(model)
    rng, np_rng, py_rng = torch.get_rng_state(), np.random.get_state(), random.getstate()
    fast = torch.backends.mha.get_fastpath_enabled()
    original = F.multi_head_attention_forward
    try:
        yield
    finally:
        F.multi_head_attention_forward = original
        torch.backends.mha.set_fastpath_enabled(fast)
        snapshot.restore()
        torch.set_rng_state(rng)
        np.random.set_state(np_rng)
        random.setstate(py_rng)


class Capture:
    """One tracing run: the tracer, and every tensor of the model by name."""

    def __init__(self, model: nn.Module, example: Any, *, fake: bool, training: bool = False, into: Any = None) -> None:
        self.tracer: Tracer = into.tracer if into else Tracer()
        self.values: dict[str, Value] = into.values if into else {}
        self.kinds: dict[str, str] = into.kinds if into else {}  # parameter, buffer or attribute
        self.places: dict[str, Place] = into.places if into else {}  # of tensors in plain attributes
        self._by_id: dict[int, Tensor] = {}
        self._real: list[Tensor] = []
        self.mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        with untouched(model), torch.no_grad():
            try:
                self._run(model, example, training)
            finally:
                self.tracer.listening = False

    def _run(self, model: nn.Module, example: Any, training: bool) -> None:
        self.tracer.listening = True
        names = {module: name for name, module in model.named_modules()}
        torch.backends.mha.set_fastpath_enabled(False)
        F.multi_head_attention_forward = multi_head_attention_forward
        args, kwargs = arguments(example)
        for module in names:
            module.__dict__["training"] = training
        self._swap(model)
        args, kwargs = self._input(args), self._input(kwargs)
        ops = OpRecorder(self.tracer)
        stack: list[str] = []

        def enter(module: nn.Module, _: Any) -> None:
            stack.append(self.tracer.module)
            self.tracer.module = names.get(module, self.tracer.module)

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if stack:
                self.tracer.module = stack.pop()

        with ExitStack() as context:
            context.callback(register_module_forward_pre_hook(enter).remove)
            context.callback(register_module_forward_hook(leave, always_call=True).remove)
            if self.mode is not None:
                context.enter_context(self.mode)
            context.enter_context(ops)
            context.enter_context(FunctionRecorder(self.tracer, ops))
            context.enter_context(laid_open(model))
            self.tracer.said.update(_said_of_weights(names))
            output = model(*args, **kwargs)
        self._outputs(output)

    def _swap(self, model: nn.Module) -> None:
        """Put stand-ins in the place of every tensor, and sizes that remember in the place of every int."""
        for name, module in model.named_modules():
            for kind, registered in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, tensor in list(registered.items()):
                    if tensor is not None:
                        registered[key] = self._stand_in(tensor, f"{name}.{key}".lstrip("."), kind)

        def change(value: Any, place: Place) -> Any:
            if isinstance(value, Tensor):
                if id(value) in self._by_id:
                    return self._by_id[id(value)]
                self.places[str(place)] = place
                return self._stand_in(value, str(place), "attribute")
            return Size(value, Attr(place), self.tracer)

        Walk(model).replace(change)

    def _stand_in(self, tensor: Tensor, name: str, kind: str) -> Tensor:
        known = self._by_id.get(id(tensor))
        if known is None:
            known = self._fake(tensor)
            self._by_id[id(tensor)] = known
            self._real.append(tensor)
            if name not in self.values:
                self.values[name] = Value([Atom(n) for n in tensor.shape])
                self.values[name].storage.made_of = frozenset({name})
        value = self.tracer.known(known)
        if value is None:
            value = self.tracer.bind(known, self.values[name])
        self.values.setdefault(name, value)
        self.kinds.setdefault(name, kind)
        return known

    def _fake(self, tensor: Tensor) -> Tensor:
        if self.mode is None:
            return tensor.detach().clone()
        device = "cpu" if tensor.is_meta else tensor.device
        if tensor.layout is not torch.strided:
            return self.mode.from_tensor(tensor.detach(), static_shapes=True)
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    def _input(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            known = self._fake(item)
            self.tracer.bind(known, Value([Atom(n, "a dimension of the model's input") for n in item.shape]))
            return known
        if isinstance(item, tuple | list):
            parts = [self._input(part) for part in item]
            return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
        if isinstance(item, Mapping):
            copied = {key: self._input(value) for key, value in item.items()}
            return copied if type(item) is dict else _rebuilt(item, copied)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            fields = {f.name: self._input(getattr(item, f.name)) for f in dataclasses.fields(item)}
            return dataclasses.replace(item, **fields)
        return item

    def _outputs(self, output: Any) -> None:
        self.outputs = list(tensors_in(output))
        if not self.outputs:
            raise TraceError(
                f"there is no tensor in what the model returns, a {type(output).__name__}; "
                "return tensors, also in tuples, dicts or dataclasses"
            )
        for tensor in self.outputs:
            value = self.tracer.known(tensor)
            if value is not None:
                value.tie_rows()
                for dim in value.dims:
                    fix(dim, "a dimension of the model's output")


def _said_of_weights(names: Mapping[nn.Module, str]) -> Iterator[tuple[Place, Expr]]:
    """Attributes that only say what weights are, as what they are made of, for code that computes with them."""
    for module, owner in names.items():
        if isinstance(module, _PLAIN) and module._parameters.get("weight") is not None:
            for name, size in readable(module):
                if isinstance(size, Size) and plain(size) == plain(module.__dict__[name]):
                    yield Place(owner, (name,)), size.expr


def _rebuilt(item: Any, copied: dict[Any, Any]) -> Any:
    try:
        return type(item)(copied)
    except TypeError:
        return copied
