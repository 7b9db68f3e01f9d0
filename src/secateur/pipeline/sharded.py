"""Cut a model that is spread over ranks: its shapes first, on the meta device; then its tensors, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secateur.distributed import Undressed, meet, spread_like, whole
from secateur.errors import ApplyError, VerifyError
from secateur.planning.plans import Kept, Plan
from secateur.state.transaction import transaction
from secateur.state.twin import copied
from secateur.surgery import carry_out
from secateur.surgery.cut import select
from secateur.surgery.holders import tell_of_new
from secateur.verify.beside import prove

Shard = Callable[[Any], object]


def apply_sharded(
    model: nn.Module, plan: Plan, shard: Shard, optimizer: torch.optim.Optimizer | None, verify: bool
) -> None:
    """Cut a sharded model in place and shard it anew; every rank calls this. All or nothing, on every rank."""
    device = next((_device(tensor) for tensor in model.parameters()), torch.device("cpu"))
    undressed = Undressed.of(model)

    def value(name: str) -> Tensor:
        return whole(undressed.tensors[name])

    try:
        before = _copy(model) if verify and plan.example is not None else None
        with transaction(model):
            carry_out(model, plan)
            if before is not None:
                prove(before, model, plan, (value, lambda name: select(value(name), plan.kept.get(name, {}))))
            meet("apply: sharding anew")
            shard_empty(model, shard, device)
            new = _filled(model, undressed.tensors, plan)
            follow = None if optimizer is None else _following(optimizer, new, plan, undressed.tensors)
            meet("apply: done")  # on every rank, or on none
            if follow is not None:
                follow()
    except BaseException:
        undressed.restore()
        raise
    tell_of_new({name: tensor for name, tensor in undressed.tensors.items() if isinstance(tensor, nn.Parameter)})


def _copy(model: nn.Module) -> nn.Module:
    """The model without values, to look back at after the cut."""
    try:
        return copied(model, lambda _: True)
    except Exception as error:  # any code of the user's may run here
        what = f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}"
        raise VerifyError(f"the cut is proved on a copy, and {what}; pass verify=False to go without") from error


def _device(tensor: Tensor) -> torch.device:
    return tensor.to_local().device if hasattr(tensor, "to_local") else tensor.device


def shard_empty(model: nn.Module, shard: Shard, device: torch.device | None = None) -> None:
    """Have the user's function shard a model without values, then make room for these, where the mesh is if not told.

    Buffers stay as they are.
    """
    tied = {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}
    made = shard(model)
    if made is not None and made is not model:
        raise ApplyError(
            f"shard= gave back another {type(made).__name__}; it shards a model in place, such as "
            "shard=lambda model: fully_shard(model)"
        )
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    for registry, _ in buffers:
        registry.clear()  # these have their values
    model.to_empty(device=device or _mesh_device(model))
    for registry, held in buffers:
        registry.update(held)
    now = dict(model.named_parameters(remove_duplicate=False))
    firsts: dict[int, str] = {}
    for name, before in tied.items():
        first = firsts.setdefault(before, name)
        if now[name] is not now[first]:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._parameters[key] = now[first]


def _mesh_device(model: nn.Module) -> torch.device:
    """The device of the mesh that some parameter is spread over."""
    kinds = [param.device_mesh.device_type for param in model.parameters() if hasattr(param, "device_mesh")]
    if not kinds:
        raise ApplyError(
            "shard= left no parameter spread over ranks; it is the function that calls fully_shard or "
            "parallelize_module on the model"
        )
    return torch.device(kinds[0])


def _filled(model: nn.Module, old: Mapping[str, Tensor], plan: Plan) -> dict[str, nn.Parameter]:
    """Move the values of each parameter, and of its gradient, into the new shards; the new parameters by name."""
    new = dict(model.named_parameters())
    for name, param in new.items():
        kept = plan.kept.get(name, {})
        with torch.no_grad():
            param.copy_(_moved(old[name], kept, param))
        if old[name].grad is not None:
            param.grad = _moved(old[name].grad, kept, param)  # type: ignore[arg-type]
    return new


def _moved(tensor: Tensor, kept: Kept, like: Tensor) -> Tensor:
    """What stays of a tensor, spread as another one is."""
    with torch.no_grad():
        return spread_like(select(whole(tensor), kept), like)


def _following(
    optimizer: torch.optim.Optimizer, new: Mapping[str, Tensor], plan: Plan, old: Mapping[str, Tensor]
) -> Callable[[], None]:
    """What makes an optimizer go on with the new parameters, with what it remembers of the old ones cut along."""
    names = {id(old[name]): name for name in new}
    groups, state = [], {}
    for group in optimizer.param_groups:
        groups.append([new[names[id(param)]] if id(param) in names else param for param in group["params"]])
        for param in group["params"]:
            name = names.get(id(param))
            if name is None or param not in optimizer.state:
                continue
            entry = optimizer.state[param]
            state[param] = (
                new[name],
                {
                    key: _moved(value, plan.kept.get(name, {}), new[name])
                    if isinstance(value, Tensor) and value.shape == param.shape and value.dim()
                    else value
                    for key, value in entry.items()
                },
            )

    def follow() -> None:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        for param, (successor, entry) in state.items():
            del optimizer.state[param]
            optimizer.state[successor] = entry

    return follow


__all__ = ["Shard", "apply_sharded", "shard_empty"]
