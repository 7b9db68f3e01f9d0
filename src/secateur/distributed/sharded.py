"""Models whose tensors are spread over ranks by `fully_shard` (FSDP2) or `parallelize_module` (tensor parallel).

Both leave a module as it is, but for parameters that are DTensors, hooks that gather or exchange data, and a class of
FSDP2's own. Without these it is the model that the user wrote, on the meta device: that can be traced and cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.compat import dtensor, fsdp_module, sharded_places, sharding_states
from secateur.distributed.meeting import meet, ranks
from secateur.errors import ApplyError

_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_KINDS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_MARKS = (
    *("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params"),
    "_distribute_module_applied",
)
_OURS = "torch.distributed."


def is_sharded(model: nn.Module) -> bool:
    """Whether some tensors of a model are spread over ranks.

    >>> is_sharded(nn.Linear(2, 2))
    False
    """
    spread, added = dtensor(), fsdp_module()
    if added is not None and any(isinstance(module, added) for module in model.modules()):
        return True  # its tensors may be whole just now, between a forward and a backward
    registries = (held for module in model.modules() for held in (module._parameters, module._buffers))
    return spread is not None and any(isinstance(tensor, spread) for held in registries for tensor in held.values())


def plain_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before FSDP2 gave it one of its own.

    >>> plain_kind(nn.Linear) is nn.Linear
    True
    """
    added = fsdp_module()
    return kind.__bases__[1] if added is not None and len(kind.__bases__) == 2 and kind.__bases__[0] is added else kind


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards, on every rank, which all must ask for; others as they are.

    >>> whole(torch.ones(2))
    tensor([1., 1.])
    """
    kind = dtensor()
    if kind is None or not isinstance(tensor, kind):
        return tensor
    if ranks() < tensor.device_mesh.size():
        raise ApplyError("a tensor is spread over ranks, which all must ask for it; leave out alone()")
    meet("a tensor that is spread over ranks")
    return tensor.detach().full_tensor()


def spread_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has, as another one is spread."""
    kind = dtensor()
    if kind is None or not isinstance(like, kind):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)


def at_rest(module: nn.Module) -> None:
    """Have FSDP2 take back the whole parameters that a forward left in a module."""
    owners = [owner for owner, place in sharded_places() if module in (place.module, *place.shared_modules)]
    for owner in dict.fromkeys(owners):
        owner.reshard()  # type: ignore[operator]


def reshard(model: nn.Module) -> None:
    """Have FSDP2 take back all whole parameters that a forward left in a model: it may free their memory any time."""
    added = fsdp_module()
    for module in model.modules():
        if added is not None and isinstance(module, added):
            module.reshard()


def is_managed(module: nn.Module) -> bool:
    """Whether FSDP2 gathers parameters of a module for each run, and lets go of them.

    >>> is_managed(nn.Linear(2, 2))
    False
    """
    return any(module is home for _, place in sharded_places() for home in (place.module, *place.shared_modules))


def moved(old: tuple[nn.Module, str], new: tuple[nn.Module, str]) -> None:
    """Tell FSDP2 that a parameter is in another module, or has another name."""
    for _, place in sharded_places():
        if place.module is old[0] and place.param_name == old[1]:
            place.module, place.param_name = new
        for number, home in enumerate(zip(place.shared_modules, place.shared_param_names, strict=True)):
            if home[0] is old[0] and home[1] == old[1]:
                place.shared_modules[number], place.shared_param_names[number] = new


@dataclass
class Undressed:
    """A sharded model without what sharding added to it, and all that is needed to put that back."""

    model: nn.Module
    tensors: Mapping[str, Tensor]  # as they were, under each of their names
    _kinds: list[tuple[nn.Module, type, dict[str, Any]]] = field(default_factory=list)
    _stores: list[tuple[dict[Any, Any], dict[Any, Any]]] = field(default_factory=list)
    _states: dict[nn.Module, Any] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module, *, parameters: bool = False, buffers: bool = False) -> Undressed:
        """Take off, in place, what sharding added; tensors are on the meta device then, in their whole shape, but for
        `parameters` and `buffers` if these are wanted whole, on every rank."""
        reshard(model)
        tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
        made = Undressed(model, tensors)
        try:
            made._take_off(parameters, buffers)
        except BaseException:
            made.restore()
            raise
        return made

    def _take_off(self, parameters: bool, buffers: bool) -> None:
        states, new = sharding_states(), dict[int, Tensor]()
        for module in self.model.modules():
            self._kinds.append((module, type(module), dict(module.__dict__)))
            for name in (*_HOOKS, *_KINDS, "_parameters", "_buffers"):
                store = module.__dict__.get(name) or {}
                self._stores.append((store, dict(store)))
            if module in states:
                self._states[module] = states.pop(module)
        for module in self.model.modules():
            module.__class__ = plain_kind(type(module))
            for key in [key for key in module.__dict__ if key.startswith(_MARKS)]:
                del module.__dict__[key]
            gone = {key for name in _HOOKS for key, hook in _items(module, name) if _of_sharding(hook)}
            for name in (*_HOOKS, *_KINDS):
                for key in gone & set(module.__dict__.get(name) or ()):
                    del module.__dict__[name][key]
            registries: tuple[Any, ...] = ((module._parameters, parameters), (module._buffers, buffers))
            for registry, wanted in registries:
                for key, tensor in registry.items():
                    if tensor is not None and (registry is module._parameters or isinstance(tensor, dtensor() or ())):
                        if id(tensor) not in new:
                            new[id(tensor)] = _like(tensor, whole(tensor).clone() if wanted else _empty(tensor))
                        registry[key] = new[id(tensor)]

    def restore(self) -> None:
        """The model as it was: the same classes, containers and tensors."""
        states = sharding_states()
        for module in self.model.modules():
            states.pop(module, None)
        for module, kind, held in self._kinds:
            object.__setattr__(module, "__class__", kind)
            module.__dict__.clear()
            module.__dict__.update(held)
        for store, held in self._stores:
            store.clear()
            store.update(held)
        for module, state in self._states.items():
            states[module] = state


def _items(module: nn.Module, name: str) -> list[tuple[Any, Any]]:
    return list((module.__dict__.get(name) or {}).items())


def _of_sharding(hook: Any) -> bool:
    inner = getattr(hook, "hook", getattr(hook, "func", hook))  # behind a wrapper or a partial
    return str(getattr(inner, "__module__", "")).startswith(_OURS)


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """Values as a parameter, if a tensor is one."""
    if not isinstance(tensor, nn.Parameter):
        return values
    return nn.Parameter(values.detach(), requires_grad=tensor.requires_grad)


def emptied(model: nn.Module) -> dict[str, nn.Parameter]:
    """Let a model have parameters without values, those that are one being one still; what it had, by name."""
    had = dict(model.named_parameters())
    new = {id(tensor): _like(tensor, _empty(tensor)) for tensor in had.values()}
    for module in model.modules():
        registry: dict[str, Any] = module._parameters
        registry.update({name: new[id(tensor)] for name, tensor in registry.items() if tensor is not None})
    return had


@contextmanager
def bare(model: nn.Module, *, values: bool = False) -> Iterator[nn.Module]:
    """Inside, a sharded model is as it was before, on the meta device or, with its values, whole on every rank;
    afterwards it is sharded as it was."""
    if not is_sharded(model):
        yield model
        return
    undressed = Undressed.of(model, parameters=values, buffers=values)
    try:
        yield model
    finally:
        undressed.restore()


__all__ = ["Undressed", "at_rest", "bare", "emptied", "is_managed", "is_sharded", "moved", "plain_kind", "spread_like"]
__all__ += ["reshard", "whole"]
