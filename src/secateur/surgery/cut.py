"""Carry out a plan: new tensors in the place of the old ones, attributes that say so. All or nothing."""

from __future__ import annotations

import enum
import math
import operator
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import ApplyError, PlanError
from secateur.nn.attention import MultiheadAttention
from secateur.plan.plan import Plan
from secateur.surgery.optimizer import OptimizerCut
from secateur.surgery.readable import refresh
from secateur.trace.held import Snapshot, Walk, holder, read, write
from secateur.trace.held import _items as items
from secateur.trace.sizes import Place

_CHUNK = 2**16  # elements that are held at a time beside what is made of them


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer under each of its names, tied ones too."""
    for name, module in model.named_modules():
        for registered in (module._parameters, module._buffers):
            for key, tensor in registered.items():
                if tensor is not None:
                    yield f"{name}.{key}".lstrip("."), tensor


class Cut:
    """A cut in a model, carried out on construction, that can be undone.

    Nothing of the model is changed before every new tensor exists and fits.
    """

    def __init__(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self._classes: list[tuple[nn.Module, type]] = []
        check_fit(model, plan)
        self._new = new_tensors(dict(named_tensors(model)), plan.kept)
        self._old = [tensor for _, tensor in named_tensors(model)]  # keeps ids theirs
        self._optimizer = OptimizerCut(optimizer, self._index_of(plan), self._new) if optimizer is not None else None
        self._snapshot = Snapshot(model)
        try:
            self._swap(plan)
            if self._optimizer is not None:
                self._optimizer.carry_out()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """The model and the optimizer as they were, bit for bit."""
        self._snapshot.restore()
        for module, original in reversed(self._classes):
            module.__class__ = original
        if self._optimizer is not None:
            self._optimizer.undo()

    def _index_of(self, plan: Plan) -> dict[int, Mapping[int, Sequence[int]]]:
        return {id(tensor): plan.kept[name] for name, tensor in named_tensors(self.model) if name in plan.kept}

    def _swap(self, plan: Plan) -> None:
        attentions = {m: 1 / math.sqrt(m.head_dim) for m in self.model.modules() if type(m) is nn.MultiheadAttention}
        for module in self.model.modules():
            for registered in (module._parameters, module._buffers):
                for key, tensor in registered.items():
                    if tensor is not None:
                        registered[key] = self._new.get(id(tensor), tensor)  # type: ignore[assignment]
        Walk(self.model).replace(lambda value, _: self._new.get(id(value), value))
        for place, index in plan.held:
            write(self.model, place, select(read(self.model, place), index))
        for place, _, value in plan.attributes:
            write(self.model, place, value)
        for module, scale in attentions.items():
            self._loosen(module, scale)
        for encoder in (m for m in self.model.modules() if isinstance(m, nn.TransformerEncoder)):
            if any(isinstance(m, MultiheadAttention) for m in encoder.modules()):
                encoder.__dict__["use_nested_tensor"] = False  # only torch's fused kernels can read these
        refresh(self.model)

    def _loosen(self, attention: nn.MultiheadAttention, scale: float) -> None:
        """Where torch's attention can no longer express the widths, ours takes its place."""
        width, inner = attention.out_proj.weight.shape
        packed = attention.in_proj_weight
        rows, taken = attention.q_proj_weight.shape if packed is None else (packed.shape[0] // 3, packed.shape[1])
        expressible = width == inner == rows == taken and width % attention.num_heads == 0
        if expressible and math.isclose(scale, 1 / math.sqrt(width // attention.num_heads)):
            return
        self._classes.append((attention, type(attention)))
        attention.__class__ = MultiheadAttention
        attention.__dict__["scale"] = scale
        attention.__dict__["_qkv_same_embed_dim"] = False  # keeps torch's fused kernels away


def check_fit(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that was made for another model."""
    have = dict(named_tensors(model))
    for name, shape in plan.shapes.items():
        if name not in have:
            raise PlanError(
                f"the plan cuts {name}, which {type(model).__name__} does not have; is it for another model?"
            )
        if tuple(have[name].shape) != tuple(shape):
            raise PlanError(
                f"the plan cuts {name} of shape {tuple(shape)}, here it is {tuple(have[name].shape)}; "
                "trace and plan this model anew"
            )
        for dim, index in plan.kept[name].items():
            _check_index(name, dim, index, shape)
    modules = dict(model.named_modules())
    for place, was, _ in plan.attributes:
        now = _reached(modules, place)
        if isinstance(now, bool | enum.Enum) or not isinstance(now, int) or now != was:
            raise PlanError(f"the plan expects {place} to be {was}, here it is {reprlib.repr(now)}")
    for place, dims in plan.held:
        now = _reached(modules, place)
        if not isinstance(now, Tensor):
            raise PlanError(f"the plan cuts {place}, which is a {type(now).__name__} here, not a tensor")
        for dim, index in dims.items():
            _check_index(str(place), dim, index, now.shape)


def _reached(modules: Mapping[str, nn.Module], place: Place) -> Any:
    """What a place holds, if tracing looks there: never at a method, a hook, a registry or a class."""
    obj: Any = modules.get(place.owner)
    for at, step in enumerate(place.path):
        store = None if at and isinstance(obj, nn.Module) else holder(obj)
        if isinstance(obj, tuple) and not isinstance(obj, torch.Size):
            inside = dict(enumerate(obj))
        else:
            inside = {} if store is None else dict(items(store, obj))
        if step not in inside:
            raise PlanError(f"the plan sets {place}, no plain value of this model; is it for another model?")
        obj = inside[step]
    return obj


def _check_index(name: str, dim: int, index: Sequence[int], shape: Sequence[int]) -> None:
    if not 0 <= dim < len(shape):
        raise PlanError(f"the plan cuts dimension {dim} of {name}, which has {len(shape)}")
    if not index or any(map(operator.ge, index, islice(index, 1, None))):
        raise PlanError(f"the plan's positions for {name} dim {dim} are not a rising, non-empty list")
    if index[0] < 0 or index[-1] >= shape[dim]:
        raise PlanError(f"the plan keeps position {index[-1]} of {name} dim {dim}, which has {shape[dim]}")


def select(tensor: Tensor, kept: Mapping[int, Sequence[int]]) -> Tensor:
    """The kept slices of a tensor, in its memory format."""
    return fill(room(tensor, kept), tensor, kept)


def room(tensor: Tensor, kept: Mapping[int, Sequence[int]]) -> Tensor:
    """Memory for the kept slices of a tensor, in its memory format."""
    shape = [len(kept[dim]) if dim in kept else size for dim, size in enumerate(tensor.shape)]
    layouts = (torch.channels_last, torch.channels_last_3d)
    layout = next((f for f in layouts if _only(tensor, f)), torch.contiguous_format)
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout)


@torch.no_grad()
def fill(new: Tensor, tensor: Tensor, kept: Mapping[int, Sequence[int]]) -> Tensor:
    """Put the kept slices of a tensor into the room made for them, a few at a time."""
    old = tensor.detach()
    index = {dim: torch.from_numpy(np.array(i, np.int64)).to(old.device) for dim, i in kept.items()}
    if not index:
        return new.copy_(old)
    (along, rows), *others = sorted(index.items())
    if not others:
        return torch.index_select(old, along, rows, out=new)
    *middle, (last, columns) = others
    step = max(1, _CHUNK * old.shape[along] // max(old.numel(), 1))
    for start in range(0, len(rows), step):
        part = old.index_select(along, rows[start : start + step])
        for dim, positions in middle:
            part = part.index_select(dim, positions)
        torch.index_select(part, last, columns, out=new.narrow(along, start, part.shape[along]))
    return new


def _only(tensor: Tensor, layout: torch.memory_format) -> bool:
    dims = 4 if layout is torch.channels_last else 5
    return tensor.dim() == dims and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()


def new_tensors(have: Mapping[str, Tensor], kept: Mapping[str, Mapping[int, Sequence[int]]]) -> dict[int, Tensor]:
    """The cut tensor for each old one, by its id; tied names must agree."""
    firsts: dict[int, str] = {}
    for name, dims in kept.items():
        first = firsts.setdefault(id(have[name]), name)
        if dict(kept[first]) != dict(dims):
            raise ApplyError(f"{name} and {first} are one tensor, but the plan cuts them differently")
    # All that stays is allocated first: memory that is only passed through would leave holes in between.
    made = {name: room(have[name], kept[name]) for name in firsts.values()}
    for name, data in made.items():
        fill(data, have[name], kept[name])
    return {id(have[n]): _like(have[n], data, partial(select, kept=kept[n])) for n, data in made.items()}


def _like(old: Tensor, data: Tensor, follow: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor with everything that the old one had besides its data: flags, gradient, hooks, attributes."""
    if not isinstance(old, nn.Parameter):
        return data.requires_grad_(old.requires_grad) if old.requires_grad else data
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    if old.grad is not None:
        new.grad = follow(old.grad)
    for key, value in vars(old).items():
        new.__dict__[key] = value
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    return new


__all__: list[Any] = ["Cut", "check_fit", "named_tensors", "new_tensors", "select"]
